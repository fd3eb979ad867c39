"""Description of dies: their rates, matrix products, memory levels, energy, area and price.

Units are in the key names and decimal: GB is 1e9 B, TFLOP 1e12 FLOP.
"""

# Units keep their case in key names: GB and gb differ.
# ruff: noqa: N815

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from jaxmoe.config.base import Amount, Count, Latency, Name, Rate, Section
from jaxmoe.config.open_section import OpenSection
from jaxmoe.errors import RuleError
from jaxmoe.registry import KERNEL_MODELS


class GemmConfig(OpenSection):
    """How well a die multiplies matrices: a kernel model of those below, or one of the user's own."""

    tag_about = "the way products are timed"
    known: ClassVar[dict[str, Any]] = {}
    registry = KERNEL_MODELS

    kind: str


class TiledGemmConfig(GemmConfig):
    """Products of matrices that are computed in whole tiles."""

    kind: Literal["tiled"] = Field(description="the way products are timed", examples=["tiled"])
    tile_tokens: Count = Field(description="the tokens of one tile", examples=[128])
    tile_columns: Count = Field(description="the columns of an expert, its intermediate size, in one tile")
    startup_ns: Latency = Field(default=0.0, description="what every product takes to start up in ns", examples=[2000])


class MeasuredGemmConfig(GemmConfig):
    """Measured times of an expert's FFN. A relative path starts at the YAML file that holds it."""

    kind: Literal["measured"] = Field(description="the way products are timed", examples=["measured"])
    path: Name = Field(
        description="the path of a CSV file with the columns tokens, columns and seconds", examples=["gemm/b200.csv"]
    )


class FittedGemmConfig(GemmConfig):
    """A fused MoE kernel of a file that `jaxmoe calibrate` wrote. A relative path starts at the YAML file.

    Where it leads nowhere, a shipped file of that name is taken.
    """

    kind: Literal["fitted"] = Field(description="the way products are timed", examples=["fitted"])
    path: Name = Field(description="the path of a file of fitted kernels", examples=["kernels/h100_sxm.json"])
    backend: Literal["sglang", "vllm", "trtllm"] = Field(description="whose kernel runs", examples=["trtllm"])
    precision: Name = Field(description="the precision of its weights and activations", examples=["bfloat16"])
    kernel: Name | None = Field(
        default=None, description="its name in the measured tables, or null for the one with the most measurements"
    )
    sheet: Name | None = Field(
        default=None, description="the GPU whose data sheet is taken, or null for the one that was measured"
    )
    top_k: Count = Field(default=8, description="how many choices of a token fall on a node, for the vectors it moves")


class OwnGemmConfig(GemmConfig):
    """A kernel model of the user's own; its settings are the fields of its class."""


GemmConfig.known.update(tiled=TiledGemmConfig, measured=MeasuredGemmConfig, fitted=FittedGemmConfig)
GemmConfig.own = OwnGemmConfig


class DieConfig(Section):
    """One node's compute and memory; all nodes are alike, but for those of `dies`."""

    compute_TFLOPs_per_s: Rate = Field(description="the achievable compute rate of one node in TFLOP/s", examples=[5])
    memory_bandwidth_GB_per_s: Rate | None = Field(
        default=None, description="the memory bandwidth of one node in GB/s, or null for no limit", examples=[1000]
    )
    memory_capacity_GB: Rate | None = Field(
        default=None, description="the memory of one node in GB, or null for no limit", examples=[8]
    )
    gemm: GemmConfig | None = Field(
        default=None,
        description="how well a die multiplies matrices as {kind: tiled, tile_tokens: .., tile_columns: ..} or "
        "{kind: measured, path: ..} or {kind: fitted, path: .., backend: .., precision: ..}, or null for its full rate "
        "at every shape",
    )
    overlap: bool = Field(
        default=True,
        description="whether a die reads memory while it multiplies, so that the longer of both counts; else they add "
        "up",
        examples=[False],
    )
    energy_pJ_per_FLOP: Amount | None = Field(
        default=None, description="the energy of a FLOP in pJ, or null where not known", examples=[0.5]
    )
    idle_W: Amount | None = Field(
        default=None,
        description="the power of one node at all times, busy or not, in W, or null where not known",
        examples=[20],
    )
    board_W: Amount | None = Field(
        default=None,
        description="the power of the board of one device under load in W, which a deployment by measured kernels is "
        "taken to draw all the time, or null where not known",
        examples=[700],
    )
    memory_energy_pJ_per_B: Amount | None = Field(
        default=None, description="the energy of a byte to or from memory in pJ, or null where not known", examples=[30]
    )
    area_mm2: Amount | None = Field(
        default=None,
        description="the area of one node in mm2, without what its rates below add, or null where not known",
        examples=[100],
    )
    area_mm2_per_TFLOPs_per_s: Amount | None = Field(
        default=None, description="the area that each TFLOP/s of a node takes in mm2, or null for none", examples=[2]
    )
    memory_area_mm2_per_GB_per_s: Amount | None = Field(
        default=None, description="the area that each GB/s of memory bandwidth takes in mm2, or null for none"
    )
    memory_area_mm2_per_GB: Amount | None = Field(
        default=None, description="the area that each GB of memory takes in mm2, or null for none"
    )
    price: Amount | None = Field(
        default=None,
        description="the price of one node, in a currency of your choice, without what its rates below add, or null "
        "where not known",
        examples=[100],
    )
    price_per_device_hour: Amount | None = Field(
        default=None,
        description="what one device costs an hour, in a currency of your choice, or null where not known",
        examples=[2.5],
    )
    price_per_TFLOPs_per_s: Amount | None = Field(
        default=None, description="the price of each TFLOP/s of a node, or null for none", examples=[5]
    )
    memory_price_per_GB_per_s: Amount | None = Field(
        default=None, description="the price of each GB/s of memory bandwidth, or null for none", examples=[0.1]
    )
    memory_price_per_GB: Amount | None = Field(
        default=None, description="the price of each GB of memory, or null for none", examples=[10]
    )


class DieOverride(Section):
    """Nodes whose dies differ from the others: some by number, or all of a row or a column of a mesh."""

    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    nodes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="the numbers of these nodes as a list, from 0 on; in a mesh row by row, as x times the second side "
        "plus y",
        examples=[[0, 8]],
    )
    row: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="in place of nodes, x of the row of a mesh whose dies these are", examples=[1]
    )
    column: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="in place of nodes, y of the column of a mesh whose dies these are", examples=[3]
    )
    compute_TFLOPs_per_s: Rate | None = Field(
        default=None,
        description="the achievable compute rate of each of them in TFLOP/s, or null for that of the others",
        examples=[2.5],
    )
    memory_bandwidth_GB_per_s: Rate | None = Field(
        default=None,
        description="the memory bandwidth of each of them in GB/s, or null for that of the others",
        examples=[500],
    )
    memory_capacity_GB: Rate | None = Field(
        default=None, description="the memory of each of them in GB, or null for that of the others", examples=[4]
    )

    @model_validator(mode="after")
    def _says_which(self) -> "DieOverride":
        given = {"nodes": self.nodes, "row": self.row, "column": self.column}
        stated = [key for key, value in given.items() if value is not None]
        if len(stated) != 1:
            remedy = "Write the numbers of these nodes as a list, or the number of a row or a column"
            raise RuleError((), stated, "nodes, or row, or column", remedy)
        return self

    def nodes_in(self, shape: tuple[int, int] | None) -> tuple[int, ...]:
        """These nodes by number; those of a row or column are of a mesh of this shape."""
        if self.nodes is not None:
            return self.nodes
        rows, columns = cast(tuple[int, int], shape)
        if self.row is not None:
            return tuple(range(self.row * columns, (self.row + 1) * columns))
        return tuple(range(cast(int, self.column), rows * columns, columns))


class MemoryConfig(Section):
    """A level of memory. Successive nodes share a channel of it; every channel is alike."""

    name: Name = Field(description="a name for the level", examples=["hbm"])
    bandwidth_GB_per_s: Rate = Field(description="the bandwidth of one channel in GB/s", examples=[1000])
    latency_ns: Latency = Field(
        default=0.0, description="what a channel takes once for each stage that uses it in ns", examples=[100]
    )
    capacity_GB: Rate | None = Field(
        default=None,
        description="the memory behind one channel in GB, or null for no limit; weights have to fit the last level",
        examples=[16],
    )
    energy_pJ_per_B: Amount | None = Field(
        default=None, description="the energy of a byte to or from this level in pJ, or null where not known"
    )
    area_mm2_per_GB_per_s: Amount | None = Field(
        default=None, description="the area that each GB/s of a channel takes in mm2, or null for none"
    )
    area_mm2_per_GB: Amount | None = Field(
        default=None, description="the area that each GB behind a channel takes in mm2, or null for none"
    )
    price_per_GB_per_s: Amount | None = Field(
        default=None, description="the price of each GB/s of a channel, or null for none"
    )
    price_per_GB: Amount | None = Field(
        default=None, description="the price of each GB behind a channel, or null for none"
    )
    nodes_per_channel: Count = Field(
        default=1, description="the number of successive nodes that share a channel", examples=[2]
    )

    @model_validator(mode="after")
    def _capacity_is_there(self) -> "MemoryConfig":
        capacity = ("capacity_GB", self.capacity_GB)
        check_needed(self, {"area_mm2_per_GB": capacity, "price_per_GB": capacity})
        return self


def check_needed(section: Section, needed: dict[str, tuple[str, float | None]], *where: str) -> None:
    """Refuse a number for each unit of something that is not stated; `needed` has its key and value."""
    for key, (other, value) in needed.items():
        if getattr(section, key) is not None and value is None:
            expected = f"no value where {other} is null"
            raise RuleError((*where, key), getattr(section, key), expected, f"Write {other} as well, or remove it")
