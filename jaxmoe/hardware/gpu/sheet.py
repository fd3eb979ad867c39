"""The data sheet of a GPU: peak rates, bandwidths, processors."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.relax import as_number

# Bytes of one weight and of one activation, and which peak rate a product of a precision runs at.
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "half": 2.0,
    "int8": 1.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
    "int4_wo": 0.5 + 2 / 128,
    "w4a16_mxfp4": 0.5 + 1 / 32,
    "w4a8_mxfp4_mxfp8": 0.5 + 1 / 32,
}
ACTIVATION_BYTES = {"fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "w4a8_mxfp4_mxfp8": 1.0}
RATE = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "w4a8_mxfp4_mxfp8": "fp8", "int8": "fp8"}


class Sheet(eqx.Module):
    """Numbers of one GPU. `fp4` is the rate of FP8 where a GPU has no FP4 units."""

    bandwidth: Float[Array, ""] = eqx.field(converter=as_number)  # of memory, B/s
    bf16: Float[Array, ""] = eqx.field(converter=as_number)  # dense FLOP/s
    fp8: Float[Array, ""] = eqx.field(converter=as_number)
    fp4: Float[Array, ""] = eqx.field(converter=as_number)
    processors: Float[Array, ""] = eqx.field(converter=as_number)  # streaming multiprocessors
    link: Float[Array, ""] = eqx.field(converter=as_number)  # to the other GPUs of its domain, each way, B/s
    node: int = eqx.field(static=True, default=8)  # GPUs of a node
    domain: int = eqx.field(static=True, default=8)  # GPUs that these links join, of one node or of several

    def rate(self, precision: str) -> Float[Array, ""]:
        """Peak FLOP/s of products of this precision."""
        return getattr(self, RATE.get(precision, "bf16"))

    def without(self, processors: float | int | Float[Array, ""]) -> "Sheet":
        """A GPU that has so many processors less, and so much less of each rate; memory and links stay."""
        part = 1 - processors / self.processors
        rates = {name: part * getattr(self, name) for name in ("bf16", "fp8", "fp4", "processors")}
        return replace(self, **rates)

    @classmethod
    def of(
        cls,
        bandwidth: float,
        bf16: float,
        fp8: float,
        fp4: float,
        processors: float,
        link: float,
        node: int = 8,
        domain: int = 8,
    ) -> "Sheet":
        number = partial(jnp.asarray, dtype=jnp.float32)
        rates = number(bf16), number(fp8), number(fp4)
        return cls(number(bandwidth), *rates, number(processors), number(link), node, domain)


# Dense rates and bandwidths of NVIDIA's data sheets, a GPU; links one way. Bandwidth and rates of the RTX PRO 6000 are
# those at the clock that was measured. Hopper has no FP4 units. GB200 and GB300: 72 GPUs in a domain, four to a node.
SHEETS: dict[str, tuple[Any, ...]] = {
    "h100_sxm": (3.35e12, 989e12, 1979e12, 1979e12, 132.0, 450e9),
    "h200_sxm": (4.8e12, 989e12, 1979e12, 1979e12, 132.0, 450e9),
    "b200_sxm": (7.7e12, 2250e12, 4500e12, 9000e12, 148.0, 900e9),
    "b300_sxm": (8e12, 2250e12, 4500e12, 13500e12, 148.0, 900e9),
    "gb300": (8e12, 2500e12, 5000e12, 15000e12, 152.0, 900e9, 4, 72),
    "h800_sxm": (3.35e12, 989e12, 1979e12, 1979e12, 132.0, 200e9),
    "h20_sxm": (4e12, 148e12, 296e12, 296e12, 78.0, 450e9),
    "gb200": (8e12, 2500e12, 5000e12, 10000e12, 148.0, 900e9, 4, 72),
    "rtx_pro_6000_server": (1.792e12, 467.8e12, 935.6e12, 1871.2e12, 188.0, 64e9),
}


def sheet_of(system: str) -> Sheet:
    """The data sheet of one of `SHEETS`."""
    return Sheet.of(*SHEETS[system])
