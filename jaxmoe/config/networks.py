"""Machines by the kind of their network: meshes, wafers joined to one, and all others."""

# Units keep their case in key names: GB and gb differ.
# ruff: noqa: N815

import math
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, model_validator

from jaxmoe.config.base import Amount, Count, Latency, Rate, Section, pair_of
from jaxmoe.config.graph import GraphConfig
from jaxmoe.config.machine import MOST_NODES, HardwareConfig, LinkConfig
from jaxmoe.errors import RuleError
from jaxmoe.settings import Setting, made, settings_of
from jaxmoe.units import GIGA, NANO

if TYPE_CHECKING:
    from jaxmoe.hardware import AbstractTopology

LONGEST_SIDE = 64

Side = Annotated[int, Field(ge=1, le=LONGEST_SIDE)]
Shape = Annotated[tuple[Side, Side], pair_of("whole numbers", "[4, 8]")]
Coordinate = Annotated[int, Field(ge=0, le=LONGEST_SIDE - 1)]
Node = Annotated[tuple[Coordinate, Coordinate], pair_of("whole numbers", "[4, 8]")]


def check_has_links(shape: tuple[int, int], *keys: str) -> None:
    """Refuse a single node, which is what the value at these keys comes to."""
    if shape == (1, 1):
        raise RuleError(keys, [1, 1], "at least two nodes", "Write larger sides, for example [4, 8]")


Ends = tuple[tuple[int, int], tuple[int, int]]  # nodes [x, y] at which a directed link starts and ends


class LinkOverride(Section):
    """Links of a mesh that differ from the others: one from a node to its neighbour, or all of a row or a column.

    They have these numbers both ways, or with `one_way` only from their start to their end.
    """

    source: Node | None = Field(
        default=None, alias="from", description="the node [x, y] at which the link starts", examples=[[0, 0]]
    )
    destination: Node | None = Field(
        default=None, alias="to", description="the node [x, y] at which the link ends", examples=[[0, 1]]
    )
    row: Coordinate | None = Field(
        default=None, description="in place of two ends, x of the row whose links these are", examples=[1]
    )
    column: Coordinate | None = Field(
        default=None, description="in place of two ends, y of the column whose links these are", examples=[3]
    )
    one_way: bool = Field(default=False, description="whether the way back has other numbers", examples=[True])
    bandwidth_GB_per_s: Rate | None = Field(
        default=None,
        description="the bandwidth of one such link in GB/s, or null for that of the others",
        examples=[25],
    )
    latency_ns: Latency | None = Field(
        default=None, description="the latency of one such link in ns, or null for that of the others", examples=[100]
    )
    energy_pJ_per_B: Amount | None = Field(
        default=None,
        description="the energy of a byte over one such link in pJ, or null for that of the others",
        examples=[8],
    )

    @model_validator(mode="after")
    def _says_which(self) -> "LinkOverride":
        given = {"from": self.source, "to": self.destination, "row": self.row, "column": self.column}
        stated = [key for key, value in given.items() if value is not None]
        if stated not in (["from", "to"], ["row"], ["column"]):
            expected = "from and to, or row, or column"
            raise RuleError((), stated, expected, "Write the two ends of a link, or the number of a row or a column")
        if self.one_way and stated != ["from", "to"]:
            raise RuleError(("one_way",), True, "false for a whole row or column", "Write its links one by one")
        return self

    def directions(self, shape: tuple[int, int]) -> list[Ends]:
        """The directed links of a mesh of this shape that the entry describes."""
        if self.source is not None and self.destination is not None:
            pairs = [(self.source, self.destination)]
        elif self.row is not None:
            pairs = [((self.row, y), (self.row, y + 1)) for y in range(shape[1] - 1)]
        else:
            assert self.column is not None
            pairs = [((x, self.column), (x + 1, self.column)) for x in range(shape[0] - 1)]
        return pairs if self.one_way else [way for pair in pairs for way in (pair, pair[::-1])]

    def numbers(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """The directed links of `directions` by the numbers of their nodes: y counts up first."""
        return [(start[0] * shape[1] + start[1], end[0] * shape[1] + end[1]) for start, end in self.directions(shape)]


class MeshMachine(HardwareConfig):
    """A machine on a mesh of equal links. Packets go along x first and then along y, or with `yx` along y first."""

    is_mesh = True

    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")
    routing: Literal["xy", "yx"] = Field(
        default="xy", description="the order of directions in which packets go", examples=["xy"]
    )


class MeshConfig(MeshMachine):
    """A 2D mesh of equal nodes."""

    kind: Literal["mesh"] = Field(default="mesh", description="the kind of network", examples=["mesh"])
    mesh_shape: Shape = Field(
        description="the rows and columns of the mesh, 1 to 64 each: node [x, y] is in row x and column y",
        examples=[[4, 8]],
    )
    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    links: Annotated[tuple[LinkOverride, ...], Field(strict=False)] = Field(
        default=(), description="the links that differ from the others as a list of mappings"
    )

    @property
    def num_nodes(self) -> int:
        return math.prod(self.mesh_shape)

    @model_validator(mode="after")
    def _has_links(self) -> "MeshConfig":
        check_has_links(self.mesh_shape, "mesh_shape")
        return self

    @model_validator(mode="after")
    def _overrides_name_links(self) -> "MeshConfig":
        seen: set[Ends] = set()
        for index, link in enumerate(self.links):
            where: tuple[str | int, ...] = ("links", index)
            self._check_place(where, link)
            if not link.directions(self.mesh_shape):
                x, y = self.mesh_shape
                alone = f"a row or column with links (the mesh is {x}x{y})"
                raise RuleError(where, {"row": link.row, "column": link.column}, alone, "Leave this entry out")
            for ends in link.directions(self.mesh_shape):
                if ends in seen:
                    remedy = "Merge the two entries for this link, or mark both with one_way: true"
                    raise RuleError(where, [list(node) for node in ends], "each direction of a link once", remedy)
                seen.add(ends)
        return self

    def _check_place(self, where: tuple[str | int, ...], link: LinkOverride) -> None:
        x, y = self.mesh_shape
        for key, line, most in (("row", link.row, x), ("column", link.column, y)):
            if line is not None and line >= most:
                raise RuleError((*where, key), line, f"a {key} of the {x}x{y} mesh", f"Write one below {most}")
        if link.source is None or link.destination is None:
            return
        for key, node in (("from", link.source), ("to", link.destination)):
            if node[0] >= x or node[1] >= y:
                inside = f"a node [x, y] of the {x}x{y} mesh"
                raise RuleError((*where, key), list(node), inside, f"Write x below {x} and y below {y}")
        distance = abs(link.source[0] - link.destination[0]) + abs(link.source[1] - link.destination[1])
        if distance != 1:
            beside = f"a neighbour of {list(link.source)}"
            raise RuleError((*where, "to"), list(link.destination), beside, "Name the two ends of one link")


class WafersConfig(MeshMachine):
    """A grid of wafers joined at their borders: one mesh, whose links across a border have numbers of their own."""

    kind: Literal["wafers"] = Field(description="the kind of network", examples=["wafers"])
    wafer_shape: Shape = Field(description="the rows and columns of one wafer, 1 to 64 each", examples=[[8, 8]])
    grid: Shape = Field(description="the rows and columns of wafers", examples=[[2, 2]])
    border: LinkConfig = Field(description="the bandwidth and latency of the links across a border as a mapping")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """The sides of the whole mesh."""
        return self.wafer_shape[0] * self.grid[0], self.wafer_shape[1] * self.grid[1]

    @property
    def num_nodes(self) -> int:
        return math.prod(self.mesh_shape)

    @model_validator(mode="after")
    def _is_a_mesh(self) -> "WafersConfig":
        check_has_links(self.mesh_shape, "wafer_shape")
        if max(self.mesh_shape) > LONGEST_SIDE:
            x, y = self.mesh_shape
            most = f"wafers that make at most {LONGEST_SIDE} nodes along a side (these make {x}x{y})"
            raise RuleError(("grid",), list(self.grid), most, "Lower grid or wafer_shape")
        return self


# Machines of every kind, told apart by `kind`; a file without it describes a mesh.


class TorusConfig(HardwareConfig):
    """A mesh whose rows and columns are rings."""

    kind: Literal["torus"] = Field(description="the kind of network", examples=["torus"])
    mesh_shape: Shape = Field(description="the rows and columns of the torus, 1 to 64 each", examples=[[8, 8]])
    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")

    @property
    def num_nodes(self) -> int:
        return math.prod(self.mesh_shape)

    @model_validator(mode="after")
    def _has_links(self) -> "TorusConfig":
        check_has_links(self.mesh_shape, "mesh_shape")
        _check_not_too_many(self.num_nodes, "mesh_shape", list(self.mesh_shape))
        return self


class UniformConfig(HardwareConfig):
    """Nodes on a ring, around one switch, or each linked to every other."""

    kind: Literal["ring", "switch", "fully_connected"] = Field(description="the kind of network", examples=["ring"])
    nodes: int = Field(ge=2, le=MOST_NODES, description=f"the number of nodes, 2 to {MOST_NODES}", examples=[8])
    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def switched(self) -> tuple[int, int] | None:
        return (1, self.nodes) if self.kind == "switch" else None


class ClustersConfig(HardwareConfig):
    """Clusters of nodes around a switch each, and every such switch linked to every one of the spines above."""

    kind: Literal["clusters"] = Field(description="the kind of network", examples=["clusters"])
    clusters: Count = Field(description="the number of clusters", examples=[4])
    nodes_per_cluster: Count = Field(description="the number of nodes in one cluster", examples=[8])
    link: LinkConfig = Field(description="the bandwidth and latency between a node and its switch as a mapping")
    uplink: LinkConfig = Field(description="the bandwidth and latency between a switch and a spine as a mapping")
    spines: int = Field(default=1, ge=1, le=MOST_NODES, description="the number of spines", examples=[4])

    @property
    def num_nodes(self) -> int:
        return self.clusters * self.nodes_per_cluster

    @property
    def switched(self) -> tuple[int, int] | None:
        return self.clusters, self.nodes_per_cluster

    @model_validator(mode="after")
    def _has_nodes(self) -> "ClustersConfig":
        if self.num_nodes == 1:
            raise RuleError(("nodes_per_cluster",), 1, "at least two nodes in all", "Raise it or clusters")
        _check_not_too_many(self.num_nodes, "clusters", self.clusters)
        return self


def _check_not_too_many(nodes: int, key: str, value: object) -> None:
    if nodes > MOST_NODES:
        raise RuleError((key,), value, f"at most {MOST_NODES} nodes in all (these are {nodes})", "Write a smaller one")


class OwnNetworkConfig(HardwareConfig):
    """A topology of the user's own; its settings are the fields of its class beyond those of every topology."""

    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")

    @classmethod
    def settings_of_part(cls, part: type) -> dict[str, Setting]:
        from jaxmoe.hardware import AbstractTopology  # with JAX, only where a part of the user's own is named

        return settings_of(part, beyond=AbstractTopology)

    @property
    def num_nodes(self) -> int:
        return self.topology().num_nodes

    def topology(self) -> "AbstractTopology":
        """The network in B/s and s, all links alike."""
        link, settings = self.link, self.settings_of_part(self.part)
        numbers = {"bandwidth": link.bandwidth_GB_per_s * GIGA, "latency": link.latency_ns * NANO}
        network: AbstractTopology = made(self.part.uniform, self.values_of_part(), settings, **numbers)
        return network

    @model_validator(mode="after")
    def _makes_a_network(self) -> "OwnNetworkConfig":
        try:
            nodes = self.num_nodes
        except ValueError as error:
            expected = f"settings that make a network ({error})"
            raise RuleError(("kind",), self.kind, expected, "Correct its settings") from error
        if nodes < 2:
            raise RuleError(("kind",), self.kind, f"at least two nodes (these are {nodes})", "Correct its settings")
        _check_not_too_many(nodes, "kind", self.kind)
        return self


_NETWORKS = (MeshConfig, WafersConfig, TorusConfig, UniformConfig, ClustersConfig, GraphConfig)
HardwareConfig.known.update(
    {kind: section for section in _NETWORKS for kind in get_args(section.model_fields["kind"].annotation)}
)
HardwareConfig.own = OwnNetworkConfig
