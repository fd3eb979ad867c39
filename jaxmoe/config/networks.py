"""Machines of every kind, told apart by `kind`; a file without it describes a mesh."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxmoe.config.base import Count, RuleError
from jaxmoe.config.graph import GraphConfig
from jaxmoe.config.machine import DEFAULT_KIND, MOST_NODES, LinkConfig, Machine
from jaxmoe.config.meshes import MeshConfig, Shape, WafersConfig, check_has_links


class TorusConfig(Machine):
    """A mesh whose rows and columns are rings."""

    kind: Literal["torus"] = Field(description="the kind of network", examples=["torus"])
    mesh_shape: Shape = Field(description="the two sides of the torus, 1 to 64 nodes each", examples=[[8, 8]])
    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")

    @property
    def num_nodes(self) -> int:
        return math.prod(self.mesh_shape)

    @model_validator(mode="after")
    def _has_links(self) -> "TorusConfig":
        check_has_links(self.mesh_shape, "mesh_shape")
        _check_not_too_many(self.num_nodes, "mesh_shape", list(self.mesh_shape))
        return self


class UniformConfig(Machine):
    """Nodes on a ring, around one switch, or each linked to every other."""

    kind: Literal["ring", "switch", "fully_connected"] = Field(description="the kind of network", examples=["ring"])
    nodes: int = Field(ge=2, le=MOST_NODES, description=f"the number of nodes, 2 to {MOST_NODES}", examples=[8])
    link: LinkConfig = Field(description="the bandwidth and latency of the links as a mapping")

    @property
    def num_nodes(self) -> int:
        return self.nodes


class ClustersConfig(Machine):
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

    @model_validator(mode="after")
    def _has_nodes(self) -> "ClustersConfig":
        if self.num_nodes == 1:
            raise RuleError(("nodes_per_cluster",), 1, "at least two nodes in all", "Raise it or clusters")
        _check_not_too_many(self.num_nodes, "clusters", self.clusters)
        return self


def _check_not_too_many(nodes: int, key: str, value: object) -> None:
    if nodes > MOST_NODES:
        raise RuleError((key,), value, f"at most {MOST_NODES} nodes in all (these are {nodes})", "Write a smaller one")


def _mesh_by_default(value: Any) -> Any:
    return {"kind": DEFAULT_KIND, **value} if isinstance(value, dict) else value


HardwareConfig = Annotated[
    MeshConfig | WafersConfig | TorusConfig | UniformConfig | ClustersConfig | GraphConfig,
    Field(discriminator="kind"),
    BeforeValidator(_mesh_by_default),
]
