"""The machine as a user describes it. Units are in the key names and decimal: GB is 1e9 B, TFLOP 1e12 FLOP."""

# Units keep their case in key names: GB is no gb.
# ruff: noqa: N815

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxmoe.config.base import Count, Name, Rate, RuleError, Section

Side = Annotated[int, Field(ge=1, le=64)]
Coordinate = Annotated[int, Field(ge=0, le=63)]


def _as_pair(value: Any) -> Any:
    """Take a pair as a whole: pydantic would report a short list as a missing second entry."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise RuleError((), value, "two whole numbers in brackets", "Write them as [4, 8]")
    return tuple(value)


Node = Annotated[tuple[Coordinate, Coordinate], BeforeValidator(_as_pair)]
Latency = Annotated[float, Field(ge=0, le=1e12)]


class DieConfig(Section):
    """One node's compute and memory; all nodes are alike."""

    compute_TFLOPs_per_s: Rate = Field(description="the achievable compute rate of one node in TFLOP/s", examples=[5])
    memory_bandwidth_GB_per_s: Rate | None = Field(
        default=None, description="the memory bandwidth of one node in GB/s, or null for no limit", examples=[1000]
    )
    memory_capacity_GB: Rate | None = Field(
        default=None, description="the memory of one node in GB, or null for no limit", examples=[8]
    )


class LinkConfig(Section):
    """Every directed link of the mesh, unless `links` says otherwise."""

    bandwidth_GB_per_s: Rate = Field(description="the bandwidth of one directed link in GB/s", examples=[50])
    latency_ns: Latency = Field(default=0.0, description="the latency of one hop in ns", examples=[100])


class LinkOverride(Section):
    """One directed link that differs from the others."""

    source: Node = Field(alias="from", description="the node [x, y] at which the link starts", examples=[[0, 0]])
    destination: Node = Field(alias="to", description="the node [x, y] at which the link ends", examples=[[0, 1]])
    bandwidth_GB_per_s: Rate | None = Field(
        default=None, description="the bandwidth of this link in GB/s, or null for that of the others", examples=[25]
    )
    latency_ns: Latency | None = Field(
        default=None, description="the latency of this link in ns, or null for that of the others", examples=[100]
    )


class PortsConfig(Section):
    """What a node can send and receive over all its links together."""

    injection_GB_per_s: Rate | None = Field(
        default=None, description="the rate at which a node can send in GB/s, or null for no limit", examples=[100]
    )
    ejection_GB_per_s: Rate | None = Field(
        default=None, description="the rate at which a node can receive in GB/s, or null for no limit", examples=[100]
    )


class RouterConfig(Section):
    """How messages pass through the network."""

    switching: Literal["store_and_forward", "cut_through"] = Field(
        default="store_and_forward",
        description="whether a router receives a chunk whole before it sends it on",
        examples=["cut_through"],
    )
    chunk_B: Count | None = Field(
        default=1024, description="the size of the chunks of a message in B, or null to send it whole", examples=[1024]
    )
    endpoint_latency_ns: Latency = Field(
        default=0.0, description="what a message takes besides its hops to get in and out in ns", examples=[50]
    )
    efficiency: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="the part of their bandwidth that links and ports yield to many flows, above 0 and at most 1",
        examples=[0.9],
    )


class HardwareConfig(Section):
    """A 2D mesh of equal nodes."""

    name: Name = Field(default="unnamed", description="a name for tables", examples=["nmp_4x8"])
    kind: Literal["mesh"] = Field(default="mesh", description="the kind of network", examples=["mesh"])
    mesh_shape: Annotated[tuple[Side, Side], BeforeValidator(_as_pair)] = Field(
        description="the two sides of the mesh, 1 to 64 nodes each", examples=[[4, 8]]
    )
    die: DieConfig = Field(description="the compute and memory of a node as a mapping")
    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")
    ports: PortsConfig = Field(
        default=PortsConfig(), description="the injection and ejection limits of a node as a mapping"
    )
    router: RouterConfig = Field(default=RouterConfig(), description="how messages pass the network as a mapping")
    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    links: Annotated[tuple[LinkOverride, ...], Field(strict=False)] = Field(
        default=(), description="the links that differ from the others as a list of mappings"
    )

    @model_validator(mode="after")
    def _has_links(self) -> "HardwareConfig":
        if self.mesh_shape == (1, 1):
            raise RuleError(("mesh_shape",), [1, 1], "at least two nodes", "Write larger sides, for example [4, 8]")
        return self

    @model_validator(mode="after")
    def _overrides_name_links(self) -> "HardwareConfig":
        seen = set()
        for index, link in enumerate(self.links):
            where: tuple[str | int, ...] = ("links", index)
            self._check_ends(where, link)
            if (link.source, link.destination) in seen:
                ends = [list(link.source), list(link.destination)]
                raise RuleError(where, ends, "each link once", "Merge the two entries for this link")
            seen.add((link.source, link.destination))
        return self

    def _check_ends(self, where: tuple[str | int, ...], link: LinkOverride) -> None:
        x, y = self.mesh_shape
        for key, node in (("from", link.source), ("to", link.destination)):
            if node[0] >= x or node[1] >= y:
                inside = f"a node [x, y] of the {x}x{y} mesh"
                raise RuleError((*where, key), list(node), inside, f"Write x below {x} and y below {y}")
        distance = abs(link.source[0] - link.destination[0]) + abs(link.source[1] - link.destination[1])
        if distance != 1:
            beside = f"a neighbour of {list(link.source)}"
            raise RuleError((*where, "to"), list(link.destination), beside, "Name the two ends of one link")
