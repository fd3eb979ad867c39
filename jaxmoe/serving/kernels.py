"""The fitted kernels that a backend runs on a GPU, by what they compute; others stand in for what is not measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.gpu.files import KernelFile, KernelFileError, KnownKernel
from jaxmoe.hardware.gpu.kernel import FittedKernel, Terms
from jaxmoe.hardware.gpu.latent import LatentSizes
from jaxmoe.hardware.gpu.sheet import ACTIVATION_BYTES, Sheet
from jaxmoe.hardware.gpu.terms import TILE_ROWS, ExpertLoads, Numbers
from jaxmoe.hardware.machine import Die, Machine, node_memory
from jaxmoe.serving import kernel_terms

# What another precision's kernel stands in for, the nearest first.
NEAREST = {
    "nvfp4": ("fp8", "fp8_block", "bfloat16"),
    "int4_wo": ("bfloat16",),
    "w4a16_mxfp4": ("w4a8_mxfp4_mxfp8", "nvfp4", "bfloat16"),
    "fp8": ("fp8_block", "bfloat16"),
    "fp8_block": ("fp8", "bfloat16"),
}
SAME_NUMBERS = {name: {"fp8", "fp8_block"} for name in ("fp8", "fp8_block")}
# Kernels of experts without a gate, and those that TensorRT-LLM is to be given where attention is not data parallel.
OTHER_EXPERTS = ("nongated",)
QUICK = "min_latency"
OF_ALL_EXPERTS = ("vllm_fp8moe_triton_tritonexperts",)
OF_SOME_EXPERTS = ("vllm_fp8moe_flashinfer_cutlass_flashinferexperts",)
# Kernels of experts behind DeepEP's exchanges, by their operation; the normal ones fill blocks of rows.
BEHIND = {"deepep_normal": "moe_context", "deepep_low_latency": "moe_generation"}
IN_BLOCKS = "deepep_normal"
ALL_TO_ALL = "NVLinkTwoSided"  # what TensorRT-LLM takes where GPUs of several nodes are joined by NVLink
Names = Mapping[str, str]
Seconds = Float[Array, "..."]
Given = Any
"""Rows of any axes as an array of JAX or NumPy, or one number for all."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """Times of what a backend runs on the GPU of `file`.

    All times are those of one launch, s, of the common shape of the arguments. `notes` collects what stood in for
    what. A kernel that nothing can stand in for raises `KernelFileError`.
    """

    file: KernelFile
    backend: str
    notes: set[str] = field(default_factory=set)

    @property
    def sheet(self) -> Sheet:
        """The data sheet of the GPU."""
        return self.file.sheet

    @property
    def machine(self) -> Machine:
        """One GPU as the engine's machine; all do alike, and the fullest is timed."""
        alone = Mesh.uniform(self.sheet.link, 0.0, shape=(1, 1))
        return Machine(alone, Die(self.sheet.bf16[None]), node_memory(self.sheet.bandwidth[None]))

    def without(self, processors: int) -> "Kernels":
        """These kernels where others have so many of the GPU's processors."""
        if processors == 0:
            return self
        return replace(self, file=replace(self.file, sheet=self.sheet.without(processors)))

    def product(self, rows: Given, columns: Given, inner: Given, precision: str) -> Seconds:
        """One product [rows, inner] by [inner, columns], of what lies on the GPU.

        Tables of kernels that are launched one by one time the host where the GPU is quicker (vLLM's FP8 by blocks:
        80 µs at least). A step launches all as one graph, so the least time of the kernels of a kind of numbers counts.
        """
        kernel = self._choose("gemm", {"gemm_dtype": precision})
        alike = SAME_NUMBERS.get(kernel.names["gemm_dtype"], {kernel.names["gemm_dtype"]})
        names = [{"framework": kernel.names["framework"], "gemm_dtype": each} for each in sorted(alike)]
        fits = [each for each in self.file.of_kind("gemm") if any(_has(each, some) for some in names)]
        given = _arrays(rows, columns, inner)
        return _least([self._time(each, kernel_terms.product, given, each.names["gemm_dtype"]) for each in fits])

    def experts(
        self,
        loads: ExpertLoads,
        hidden: Given,
        inner: Given,
        experts: Given,
        top_k: Given,
        precision: str,
        parallel: bool,
        behind: str = "collectives",
        quick: bool = False,
    ) -> Seconds:
        """All gated experts of a GPU; `inner` is the part of their intermediate size there.

        With `parallel`, GPUs have different experts, for which vLLM takes other kernels on Hopper. `behind` is the
        exchange that brings the tokens; DeepEP's have kernels of their own, which take whole blocks of rows. `quick`
        asks for a backend's kernel of least latency, where it has one.
        """
        own = [each for each in self.file.of_kind("moe") if each.names["op_name"] == BEHIND.get(behind)]
        wanted = {"framework": self.backend, "moe_dtype": precision}
        has = any(_has(each, wanted) and _is_quick(each.names) for each in self.file.of_kind("moe"))
        unusual = (*OTHER_EXPERTS, *(OF_ALL_EXPERTS if parallel else OF_SOME_EXPERTS))
        kernel = self._choose(
            "moe",
            {"moe_dtype": precision},
            lambda names: (
                names["op_name"] == (BEHIND[behind] if own else "moe")
                and not names["kernel_source"].endswith(unusual)
                and _is_quick(names) == (quick and has)
            ),
        )
        if behind == IN_BLOCKS and own:
            loads = loads._replace(slots=TILE_ROWS[-1] * loads.tiles[..., -1])
        given = [loads, *_arrays(hidden, inner, experts, top_k)]
        return self._time(kernel, kernel_terms.experts, given, kernel.names["moe_dtype"])

    def prefill(
        self,
        batch: Given,
        tokens: Given,
        heads: Given,
        kv_heads: Given,
        size: Given,
        window: Given,
        cache: str,
    ) -> Seconds:
        """Causal attention of `batch` new prompts of `tokens` each; `window` 0 is none."""
        kernel = self._choose("attention_context", {"kv_cache_dtype": cache})
        names = kernel.names["attn_dtype"], kernel.names["kv_cache_dtype"]
        return self._time(kernel, kernel_terms.prefill, _arrays(batch, tokens, heads, kv_heads, size, window), *names)

    def decode(
        self,
        batch: Given,
        cached: Given,
        heads: Given,
        kv_heads: Given,
        size: Given,
        window: Given,
        cache: str,
    ) -> Seconds:
        """Attention of one new token of each of `batch` sequences, of which `cached` tokens are kept."""
        kernel = self._choose("attention_generation", {"kv_cache_dtype": cache})
        given = _arrays(batch, cached, heads, kv_heads, size, window)
        return self._time(kernel, kernel_terms.decode, given, kernel.names["kv_cache_dtype"])

    def latent_prefill(
        self, batch: Given, tokens: Given, heads: Given, sizes: LatentSizes, precision: str, cache: str
    ) -> Seconds:
        """A module of latent attention, projections included, for new prompts."""
        kernels = self._latent("mla_context_module", precision, cache)
        given = [sizes, *_arrays(batch, tokens, heads)]
        return _least(
            [self._time(each, kernel_terms.latent_prefill, given, *_of_latent(each.names)) for each in kernels]
        )

    def latent_decode(
        self,
        batch: Given,
        cached: Given,
        heads: Given,
        sizes: LatentSizes,
        precision: str,
        cache: str,
        queries: Given = 1.0,
    ) -> Seconds:
        """A module of latent attention, projections included, for `queries` new tokens of each sequence."""
        kernels = self._latent("mla_generation_module", precision, cache)
        given = [sizes, *_arrays(batch, cached, heads, queries)]
        return _least(
            [self._time(each, kernel_terms.latent_decode, given, *_of_latent(each.names)) for each in kernels]
        )

    def collective(self, operation: str, bytes_: Given, ranks: Given) -> Seconds:
        """A collective over `ranks` GPUs of a node, of so many bytes at each; nothing for one GPU.

        An all-reduce is the faster of the backend's own and NCCL's.
        """
        given = _arrays(bytes_, ranks)
        found = [self._time(each, kernel_terms.collective, given, operation) for each in self._exchanges(operation)]
        if not found:
            raise KernelFileError(f"{self.file.system}: has no kernel of {operation}; calibrate with a table of it")
        return jnp.where(jnp.asarray(ranks) > 1, _least(found), 0.0)

    def all_to_all(
        self, operation: str, tokens: Given, hidden: Given, top_k: Given, copies: Given, ranks: Given, precision: str
    ) -> Seconds:
        """A part of an all-to-all over `ranks` GPUs of a domain of links, with `tokens` of each.

        A token goes to so many of them, and is sent in the `precision` of experts, or as it is where these take it so.
        One GPU sends nothing.
        """
        sent = precision if precision in ACTIVATION_BYTES else "bfloat16"
        kernel = self._choose(
            "alltoall",
            {"moe_dtype": sent},
            lambda names: (names["op_name"], names["kernel_source"]) == (f"alltoall_{operation}", ALL_TO_ALL),
        )
        given = _arrays(tokens, hidden, top_k, copies, ranks)
        names = kernel.names["op_name"], kernel.names["moe_dtype"]
        return jnp.where(jnp.asarray(ranks) > 1, self._time(kernel, kernel_terms.all_to_all, given, *names), 0.0)

    def _time(self, kernel: KnownKernel, terms_of: Callable[..., Terms], given: Any, *names: str) -> Seconds:
        return _seconds(kernel.fitted, terms_of, self.sheet, names, given)

    def _latent(self, kind: str, precision: str, cache: str) -> list[KnownKernel]:
        """Modules of all backends in this precision: the work is the same, and some tables time the host."""
        names = self._choose(kind, {"gemm_type": precision, "kv_cache_dtype": cache}).names
        wanted = {name: names[name] for name in ("gemm_type", "kv_cache_dtype")}
        return [each for each in self.file.of_kind(kind) if _has(each, wanted)]

    def _exchanges(self, operation: str) -> list[KnownKernel]:
        own = [
            each
            for each in self.file.of_kind("all_reduce")
            if each.names["framework"] == self.backend and "eager" not in each.names["kernel_source"]
        ]
        common = [each for each in self.file.of_kind("nccl") if each.names["nccl_dtype"] == "half"]
        groups = (own, common)
        return [max(fits, key=_newest) for group in groups if (fits := [e for e in group if _does(e, operation)])]

    def _choose(self, kind: str, wanted: Names, usual: Callable[[Names], bool] = lambda names: True) -> KnownKernel:
        """The backend's kernel with most measured rows; else of the nearest precision, then of another backend."""
        known = [each for each in self.file.of_kind(kind) if usual(each.names)]
        own = [each for each in known if each.names["framework"] == self.backend]
        for group in (own, known):
            for names in _nearest(wanted):
                fits = [each for each in group if _has(each, names)]
                if fits:
                    kernel = max(fits, key=lambda each: each.told["rows"])
                    self._note(kind, wanted, kernel)
                    return kernel
        raise KernelFileError(f"{self.file.system}: has no kernel of kind {kind}; calibrate with a table of it")

    def _note(self, kind: str, wanted: Names, kernel: KnownKernel) -> None:
        asked = {"framework": self.backend, **wanted}
        other = {name: kernel.names[name] for name, value in asked.items() if kernel.names[name] != value}
        if other:
            told = ", ".join(f"{name} {value} for {asked[name]}" for name, value in other.items())
            self.notes.add(f"{kind}: {told}")
        if "measured_on" in kernel.told:
            self.notes.add(f"{kind}: measured on {kernel.told['measured_on']}, scaled by data sheets")


def _arrays(*values: Given) -> list[Numbers]:
    """Numbers as arrays: a Python number would be compiled in."""
    return [jnp.asarray(value, jnp.float32) for value in values]


def _least(seconds: list[Seconds]) -> Seconds:
    return jnp.min(jnp.stack(jnp.broadcast_arrays(*seconds)), axis=0)


def _has(kernel: KnownKernel, names: Names) -> bool:
    return names.items() <= kernel.names.items()


def _does(kernel: KnownKernel, operation: str) -> bool:
    return kernel.names["op_name"] == operation


def _newest(kernel: KnownKernel) -> tuple[str, int]:
    return kernel.names.get("version", ""), kernel.told["rows"]


def _is_quick(names: Names) -> bool:
    return names["kernel_source"].endswith(QUICK)


def _nearest(wanted: Names) -> list[dict[str, str]]:
    """These names, then those with one precision replaced, then with the first and the second replaced."""
    found = [dict(wanted)]
    for name, value in wanted.items():
        found += [{**each, name: other} for each in list(found) for other in NEAREST.get(value, ("bfloat16", "fp8"))]
    return found


def _of_latent(names: Names) -> tuple[str, str]:
    return names["gemm_type"], names["kv_cache_dtype"]


@eqx.filter_jit
def _seconds(kernel: FittedKernel, terms_of: Callable[..., Terms], sheet: Sheet, names: Any, given: Any) -> Seconds:
    """Seconds of a kernel whose terms are those of `terms_of`; kernels of one structure share what is compiled."""
    return kernel.seconds(terms_of(sheet, *names, *given))
