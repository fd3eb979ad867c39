"""A fitted fused MoE kernel as a kernel model of the engine: all experts of a node in one launch."""

from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.gpu.files import KernelFileError, KnownKernel, at_sheet, read_kernels
from jaxmoe.hardware.gpu.kernel import FittedKernel
from jaxmoe.hardware.gpu.sheet import ACTIVATION_BYTES, WEIGHT_BYTES, Sheet
from jaxmoe.hardware.gpu.terms import TILE_ROWS, ExpertLoads, fused_moe, whole
from jaxmoe.hardware.kernels import AbstractGemm
from jaxmoe.relax import as_number

LEAST = 1e-2  # tokens of an expert, experts of a node: no logarithm of less


class FusedGemm(AbstractGemm):
    """Seconds of the experts of a node by a kernel fitted to measurements, from the tokens of each.

    Their parts of an expert are taken to be alike, their mean; every token is taken to have `top_k` choices there.
    `peak` is the rate of the die that the engine counts FLOPs by, which tells the hidden size.
    """

    kernel: FittedKernel
    sheet: Sheet
    peak: Float[Array, ""] = eqx.field(converter=as_number)
    top_k: Float[Array, ""] = eqx.field(converter=as_number)
    precision: str = eqx.field(static=True)

    def node_seconds(self, rows, part, present, flops, columns, gemms):
        rows, count = rows * present, present.sum(axis=0)  # tokens of experts that live elsewhere are not in the launch
        mean = (part * present).sum(axis=0) / jnp.maximum(count, LEAST)
        hidden = self.peak / (flops * 2 * gemms * columns)
        loads = ExpertLoads(
            touched=jnp.maximum(jnp.minimum(rows, present).sum(axis=0), LEAST),
            slots=jnp.maximum(rows.sum(axis=0), LEAST),
            heaviest=jnp.maximum(rows.max(axis=0), LEAST),
            tokens=jnp.maximum(rows.sum(axis=0) / self.top_k, LEAST),
            tiles=jnp.maximum(whole(rows[..., None], jnp.asarray(TILE_ROWS, jnp.float32)).sum(axis=0), LEAST),
        )
        terms = fused_moe(
            loads,
            jnp.broadcast_to(hidden, count.shape),
            jnp.maximum(mean * columns, 1.0),
            jnp.maximum(count, 1.0),
            jnp.broadcast_to(self.top_k, count.shape),
            gemms,
            self.sheet,
            self.precision,
            WEIGHT_BYTES[self.precision],
            ACTIVATION_BYTES.get(self.precision, 2.0),
        )
        return jnp.minimum(rows.sum(axis=0), 1.0) * self.kernel.seconds(terms)

    def seconds(self, rows, part, present, flops, columns, gemms):
        """Each expert as a launch of its own."""
        rate = jnp.broadcast_to(flops, rows.shape).ravel()
        given, parts, here = (value.reshape(1, -1) for value in (rows, part, present))
        return self.node_seconds(given, parts, here, rate, columns, gemms).reshape(rows.shape)


def fused_gemm(
    path: Path, backend: str, precision: str, kernel: str | None, sheet: str | None, peak: float, top_k: float
) -> FusedGemm:
    """The fused MoE kernel of a file by its backend, precision and, where several are, its source.

    Without `kernel`, the one with the most measured rows; with `sheet`, at the data sheet of that GPU. Raises
    `KernelFileError` where the file has none.
    """
    file = at_sheet(read_kernels(path), sheet)
    known = file.of_kind("moe")
    fits = [each for each in known if _names(each) == (backend, precision)]
    fits = [each for each in fits if kernel in (None, each.names["kernel_source"])]
    if not fits:
        have = sorted({"/".join((*_names(each), each.names["kernel_source"])) for each in known})
        asked = "/".join(filter(None, (backend, precision, kernel)))
        raise KernelFileError(f"{path}: has no fused MoE kernel {asked}; it has {', '.join(have) or 'none'}")
    best = max(fits, key=lambda each: each.told["rows"])
    return FusedGemm(best.fitted, file.sheet, jnp.asarray(peak), jnp.asarray(top_k), precision)


def _names(kernel: KnownKernel) -> tuple[str, str]:
    return kernel.names["framework"], kernel.names["moe_dtype"]
