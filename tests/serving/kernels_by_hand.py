"""A file of kernels whose times are known: the data sheet's, all bytes and tiles one after another."""

import jax.numpy as jnp

from jaxmoe.hardware.gpu.files import KernelFile, KnownKernel
from jaxmoe.hardware.gpu.kernel import Base, FittedKernel
from jaxmoe.hardware.gpu.sheet import Sheet
from jaxmoe.hardware.gpu.terms import MOE_TILES

SHEET = Sheet.of(bandwidth=1e12, bf16=1e14, fp8=2e14, fp4=4e14, processors=10.0, link=1e11)
LAUNCH = 1e-6


def known(kind: str, bytes_: int, tiles: int, rows: int = 100, launch: float = LAUNCH, **names: str) -> KnownKernel:
    """A kernel of so many kinds of bytes and of tiles."""
    base = Base(
        launch=jnp.log(jnp.asarray(launch)),
        moved=jnp.zeros(bytes_),
        filled=jnp.zeros(tiles),
        wave=jnp.full(tiles, -30.0),
        overlap=jnp.asarray(-30.0),
    )
    return KnownKernel(kind, names, FittedKernel(base), [(0.0, 0.9, 1.1)], {"rows": rows})


def kernel_file(*more: KnownKernel) -> KernelFile:
    """Kernels of one backend in BF16, and what is given."""
    own = {"framework": "sglang"}
    kernels = (
        known("gemm", 2, 8, **own, gemm_dtype="bfloat16", op_name="gemm", kernel_source="one"),
        known("moe", 3, len(MOE_TILES), **own, moe_dtype="bfloat16", op_name="moe", kernel_source="fused"),
        known("attention_context", 2, 3, **own, attn_dtype="bfloat16", kv_cache_dtype="bfloat16"),
        known("attention_generation", 3, 4, **own, attn_dtype="bfloat16", kv_cache_dtype="bfloat16"),
        known("mla_context_module", 4, 3, **own, gemm_type="bfloat16", kv_cache_dtype="bfloat16"),
        known("mla_generation_module", 4, 4, **own, gemm_type="bfloat16", kv_cache_dtype="bfloat16"),
        *(
            known("nccl", 2, 2, nccl_dtype="half", op_name=name, kernel_source="NCCL")
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        ),
    )
    return KernelFile("made_up", "by hand", SHEET, (*kernels, *more))
