"""What machines of every kind have in common, as a user describes it.

Units are in the key names and decimal: GB is 1e9 B, TFLOP 1e12 FLOP.
"""

# Units keep their case in key names: GB is no gb.
# ruff: noqa: N815

from typing import Annotated, Literal

from pydantic import Field

from jaxmoe.config.base import Count, Name, Portion, Rate, Section

DEFAULT_KIND = "mesh"  # of files that name none
MOST_NODES = 512  # of networks whose paths between all pairs are kept

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
    """Directed links that are all alike."""

    bandwidth_GB_per_s: Rate = Field(description="the bandwidth of one directed link in GB/s", examples=[50])
    latency_ns: Latency = Field(default=0.0, description="the latency of one hop in ns", examples=[100])


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
    efficiency: Portion = Field(
        default=1.0,
        description="the part of their bandwidth that links and ports yield to many flows, above 0 and at most 1",
        examples=[0.9],
    )


class Machine(Section):
    """What machines of every kind have: the dies at the nodes, their ports, and how messages pass."""

    name: Name = Field(default="unnamed", description="a name for tables", examples=["nmp_4x8"])
    die: DieConfig | None = Field(
        default=None, description="the compute and memory of a node as a mapping, or null for a network alone"
    )
    ports: PortsConfig = Field(
        default=PortsConfig(), description="the injection and ejection limits of a node as a mapping"
    )
    router: RouterConfig = Field(default=RouterConfig(), description="how messages pass the network as a mapping")
