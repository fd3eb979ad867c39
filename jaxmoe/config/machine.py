"""Description of a machine of any kind: links, ports, routers, and the dies and memory at its nodes.

Units are in the key names and decimal: GB is 1e9 B, TFLOP 1e12 FLOP.
"""

# Units keep their case in key names: GB and gb differ.
# ruff: noqa: N815

import abc
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxmoe.config.base import Amount, Count, Latency, Name, Portion, Rate, Section
from jaxmoe.config.dies import DieConfig, DieOverride, MemoryConfig, check_needed
from jaxmoe.config.open_section import OpenSection
from jaxmoe.errors import RuleError
from jaxmoe.registry import TOPOLOGIES

MOST_NODES = 512  # of networks whose paths between all pairs are kept


class LinkTakes(Section):
    """Energy, area and price of a directed link."""

    energy_pJ_per_B: Amount | None = Field(
        default=None,
        description="the energy of a byte over one such link, one hop, in pJ, or null where not known",
        examples=[4],
    )
    area_mm2_per_GB_per_s: Amount | None = Field(
        default=None,
        description="the area that each GB/s of one such link takes in mm2, both ends together, or null for none",
        examples=[0.01],
    )
    price_per_GB_per_s: Amount | None = Field(
        default=None, description="the price of each GB/s of one such link, or null for none", examples=[0.5]
    )


class LinkConfig(LinkTakes):
    """Directed links that are all alike."""

    bandwidth_GB_per_s: Rate = Field(description="the bandwidth of one directed link in GB/s", examples=[50])
    latency_ns: Latency = Field(default=0.0, description="the latency of one hop in ns", examples=[100])


class PortsConfig(Section):
    """Limits on the rates at which a node sends and receives over all its links together, and its number of ports."""

    injection_GB_per_s: Rate | None = Field(
        default=None, description="the rate at which a node can send in GB/s, or null for no limit", examples=[100]
    )
    ejection_GB_per_s: Rate | None = Field(
        default=None, description="the rate at which a node can receive in GB/s, or null for no limit", examples=[100]
    )
    per_node: Annotated[int, Field(ge=1, le=62)] | None = Field(
        default=None,
        description="the ports of each kind that a node has beside routers with finite buffers; they share its limit, "
        "and without one each is as fast as the fastest link. Null is one with a limit, and without one as many as "
        "the node with the most links has",
        examples=[4],
    )


class RouterConfig(Section):
    """How messages pass through the network. Buffers are unbounded unless `num_vcs` is given.

    The numbers of buffers, virtual channels and allocators are named as in BookSim2.
    """

    switching: Literal["store_and_forward", "cut_through", "wormhole"] = Field(
        default="store_and_forward",
        description="whether a router receives a chunk whole before it sends it on: store_and_forward, cut_through, "
        "or wormhole, with which a chunk may also wait in several routers",
        examples=["cut_through"],
    )
    num_vcs: Annotated[int, Field(ge=1, le=62)] | None = Field(
        default=None,
        description="the virtual channels of every link and port, or null for unbounded buffers",
        examples=[4],
    )
    vc_buf_size: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=8, description="the flits that the buffer of a virtual channel holds", examples=[32]
    )
    flit_B: Rate | None = Field(default=None, description="the size of a flit in B, or null for chunk_B", examples=[64])
    internal_speedup: Annotated[float, Field(ge=1, le=64)] = Field(
        default=1.0, description="how often a crossbar switches in the time of a flit on a link", examples=[2]
    )
    credit_delay: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=1, description="the cycles that a router takes to use a credit", examples=[1]
    )
    alloc_iters: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="the iterations of the allocators (iSLIP)", examples=[1]
    )
    priority: Literal["none", "network_age"] = Field(
        default="none",
        description="who goes first where several want the same: none for all in turn (round-robin), network_age for "
        "the packet that was injected first",
        examples=["none"],
    )
    dateline: bool = Field(
        default=False,
        description="true where half of the virtual channels of a torus or ring are for packets that have crossed its "
        "end, so that packets cannot wait for each other in a circle",
    )
    chunk_B: Count | None = Field(
        default=1024, description="the size of the chunks of a message in B, or null to send it whole", examples=[1024]
    )
    endpoint_latency_ns: Latency = Field(
        default=0.0, description="what a message takes besides its hops to get in and out in ns", examples=[50]
    )
    efficiency: Portion = Field(
        default=1.0,
        description="the fraction of bandwidth that links and ports yield under contention, above 0 and at most 1",
        examples=[0.9],
    )

    @property
    def cuts_through(self) -> bool:
        """Whether a router sends a chunk on before it has received all of it."""
        return self.switching != "store_and_forward"

    @model_validator(mode="after")
    def _buffers_are_told(self) -> "RouterConfig":
        if self.num_vcs is None:
            if self.switching == "wormhole":
                remedy = "Write num_vcs as well, or cut_through"
                raise RuleError(("switching",), self.switching, "finite buffers, for num_vcs is null", remedy)
            return self
        flit, chunk = self.flit_B, self.chunk_B
        if flit is None and chunk is None:
            raise RuleError(("flit_B",), None, "a size where chunk_B is null and num_vcs is given", "Write flit_B")
        if flit is not None and chunk is not None and flit > chunk:
            remedy = "Lower it, or raise chunk_B"
            raise RuleError(("flit_B",), flit, f"at most chunk_B, {chunk}, which is cut in flits", remedy)
        if self.dateline and self.num_vcs < 2:
            raise RuleError(("num_vcs",), self.num_vcs, "at least 2 where dateline is true", "Write 2 or more")
        if self.switching != "wormhole":
            flits = 1 if flit is None else math.ceil((chunk or math.inf) / flit) if chunk else None
            if flits is None or flits > self.vc_buf_size:
                whole = "a whole message" if flits is None else f"the {flits} flits of a chunk"
                remedy = "Raise it, or write wormhole for switching"
                raise RuleError(("vc_buf_size",), self.vc_buf_size, f"room for {whole} with this switching", remedy)
        return self


class HardwareConfig(OpenSection):
    """A machine of any kind: the dies at the nodes, their ports, and how messages pass.

    Its network is of one of the kinds of `jaxmoe.config.networks`, or a topology of the user's own.
    """

    tag_about = "the kind of network"
    unstated = "mesh"
    known: ClassVar[dict[str, Any]] = {}
    registry = TOPOLOGIES
    is_mesh: ClassVar[bool] = False

    kind: str
    name: Name = Field(default="unnamed", description="a name for tables", examples=["nmp_4x8"])
    die: DieConfig | None = Field(
        default=None, description="the compute and memory of a node as a mapping, or null for a network alone"
    )
    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    dies: Annotated[tuple[DieOverride, ...], Field(strict=False)] = Field(
        default=(),
        description="the nodes whose dies differ from the others as a list of mappings such as "
        "{nodes: [0, 8], compute_TFLOPs_per_s: 2.5}",
    )
    ports: PortsConfig = Field(
        default=PortsConfig(), description="the injection and ejection limits of a node as a mapping"
    )
    router: RouterConfig = Field(default=RouterConfig(), description="how messages pass the network as a mapping")
    memory: Annotated[tuple[MemoryConfig, ...], Field(strict=False)] = Field(
        default=(),
        description="the levels of memory, the nearest first, as a list of mappings such as "
        "{name: hbm, bandwidth_GB_per_s: 1000}",
    )

    @property
    @abc.abstractmethod
    def num_nodes(self) -> int:
        """End points of messages."""

    @property
    def switched(self) -> tuple[int, int] | None:
        """Switches and the nodes around each; `None` where nodes do not stand around switches of their own."""
        return None

    def own_of_dies(self, key: str) -> dict[int, float]:
        """The numbers at a key of `die` that single nodes have of their own, by node."""
        return {
            node: value
            for entry in self.dies
            if (value := getattr(entry, key)) is not None
            for node in entry.nodes_in(getattr(self, "mesh_shape", None))
        }

    @model_validator(mode="after")
    def _dies_are_of_nodes(self) -> "HardwareConfig":
        seen: set[int] = set()
        for index, entry in enumerate(self.dies):
            self._check_line(index, entry)
            where, nodes = ("dies", index, "nodes"), self.num_nodes
            for node in entry.nodes_in(getattr(self, "mesh_shape", None)):
                if node >= nodes:
                    raise RuleError(where, node, f"a number below the {nodes} nodes", f"Write 0 to {nodes - 1}")
                if node in seen:
                    raise RuleError(where, node, "each node once", "Merge the two entries for this node")
                seen.add(node)
            gemm = None if self.die is None else self.die.gemm
            if entry.compute_TFLOPs_per_s is not None and gemm is not None and gemm.kind in ("measured", "fitted"):
                key, expected = "compute_TFLOPs_per_s", "no rate where die.gemm has measured times, which hold for all"
                raise RuleError(("dies", index, key), entry.compute_TFLOPs_per_s, expected, "Leave it out, or die.gemm")
            for key in type(entry).model_fields.keys() - {"nodes", "row", "column"}:
                value = getattr(entry, key)
                if value is not None and getattr(self.die, key, None) is None:
                    expected = f"no value where die.{key} is null"
                    raise RuleError(("dies", index, key), value, expected, f"Write die.{key} as well, or remove it")
        return self

    def _check_line(self, index: int, entry: DieOverride) -> None:
        """Refuse a row or column that the machine does not have."""
        shape = getattr(self, "mesh_shape", None)
        for key, line, side in (("row", entry.row, 0), ("column", entry.column, 1)):
            if line is None:
                continue
            if shape is None:
                raise RuleError(("dies", index, key), line, "no value but for a mesh", "Write nodes in its place")
            if line >= shape[side]:
                of = f"a {key} of the {shape[0]}x{shape[1]} mesh"
                raise RuleError(("dies", index, key), line, of, f"Write one below {shape[side]}")

    @model_validator(mode="after")
    def _memory_is_told_once(self) -> "HardwareConfig":
        if self.memory and self.die is not None:
            for key in type(self.die).model_fields:
                value = getattr(self.die, key)
                if key.startswith("memory_") and value is not None:
                    remedy = "Remove it, or the list of levels at memory"
                    raise RuleError(("die", key), value, "no value beside memory, which has its levels", remedy)
        return self

    @model_validator(mode="after")
    def _memory_of_dies_is_there(self) -> "HardwareConfig":
        if self.die is None:
            return self
        rate, capacity = self.die.memory_bandwidth_GB_per_s, self.die.memory_capacity_GB
        needed = {
            "memory_energy_pJ_per_B": ("memory_bandwidth_GB_per_s", capacity if rate is None else rate),
            "memory_area_mm2_per_GB_per_s": ("memory_bandwidth_GB_per_s", rate),
            "memory_price_per_GB_per_s": ("memory_bandwidth_GB_per_s", rate),
            "memory_area_mm2_per_GB": ("memory_capacity_GB", capacity),
            "memory_price_per_GB": ("memory_capacity_GB", capacity),
        }
        check_needed(self.die, needed, "die")
        return self

    @model_validator(mode="after")
    def _levels_have_names_of_their_own(self) -> "HardwareConfig":
        names = [level.name for level in self.memory]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise RuleError(("memory", index, "name"), name, "a name that no other level has", "Rename one of them")
        return self

    @model_validator(mode="after")
    def _channels_divide_nodes(self) -> "HardwareConfig":
        for index, level in enumerate(self.memory):
            if self.num_nodes % level.nodes_per_channel:
                legal = ", ".join(str(n) for n in range(1, self.num_nodes + 1) if self.num_nodes % n == 0)
                where = ("memory", index, "nodes_per_channel")
                divisor = f"a divisor of the {self.num_nodes} nodes"
                raise RuleError(where, level.nodes_per_channel, divisor, f"Write one of {legal}")
        return self
