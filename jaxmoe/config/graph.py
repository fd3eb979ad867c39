"""A machine whose network is written out link by link."""

# Units keep their case in key names: GB is no gb.
# ruff: noqa: N815

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator

from jaxmoe.config.base import Amount, Latency, Rate, pair_of
from jaxmoe.config.machine import MOST_NODES, HardwareConfig, LinkTakes
from jaxmoe.errors import RuleError
from jaxmoe.units import GIGA, NANO

if TYPE_CHECKING:
    from jaxmoe.hardware import Graph

Vertex = Annotated[int, Field(ge=0)]
# Strict mode would refuse the lists that YAML gives; their entries stay strict.
Path = Annotated[tuple[Vertex, ...], Field(strict=False)]
Position = Annotated[tuple[float, float], pair_of("numbers", "[0, 1.5]")]


class GraphLink(LinkTakes):
    """A link both ways, or with `one_way` only from its start to its end."""

    source: Vertex = Field(alias="from", description="the node or switch at which the link starts", examples=[0])
    destination: Vertex = Field(alias="to", description="the node or switch at which the link ends", examples=[1])
    bandwidth_GB_per_s: Rate = Field(description="the bandwidth of this link in one direction in GB/s", examples=[50])
    latency_ns: Latency = Field(default=0.0, description="the latency of this link in ns", examples=[100])
    burst_B: Amount = Field(
        default=0.0,
        description="what an idle link passes at once in B, as a token bucket does; for the event simulator alone",
        examples=[250e3],
    )
    one_way: bool = Field(
        default=False, description="whether the way back has numbers of its own, in another entry", examples=[True]
    )

    @property
    def directions(self) -> list[tuple[int, int]]:
        """The directed links (from, to) that this entry describes."""
        there = (self.source, self.destination)
        return [there] if self.one_way else [there, there[::-1]]


class GraphConfig(HardwareConfig):
    """Nodes, switches and links in any arrangement. Nodes are 0, 1, ..; the switches come after them."""

    kind: Literal["graph"] = Field(description="the kind of network", examples=["graph"])
    nodes: int = Field(ge=2, le=MOST_NODES, description=f"the number of nodes, 2 to {MOST_NODES}", examples=[4])
    switches: int = Field(default=0, ge=0, le=MOST_NODES, description="the number of switches", examples=[1])
    links: Annotated[tuple[GraphLink, ...], Field(strict=False)] = Field(
        description="all links as a list of mappings {from: 0, to: 1, bandwidth_GB_per_s: 50}"
    )
    paths: Annotated[tuple[Path, ...], Field(strict=False)] = Field(
        default=(), description="the paths that are not the shortest as a list of lists such as [0, 4, 1]"
    )
    positions: Annotated[tuple[Position, ...], Field(strict=False)] | None = Field(
        default=None, description="where to draw nodes and switches as a list of [right, down], or null for a circle"
    )

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def num_vertices(self) -> int:
        return self.nodes + self.switches

    @model_validator(mode="after")
    def _links_join_vertices(self) -> "GraphConfig":
        directed: set[tuple[int, int]] = set()
        for index, link in enumerate(self.links):
            self._check_ends(("links", index), link)
            if not directed.isdisjoint(link.directions):
                once = "each direction once"
                remedy = "Merge the two entries, or mark both with one_way: true"
                raise RuleError(("links", index), [link.source, link.destination], once, remedy)
            directed.update(link.directions)
        for index, link in enumerate(self.links):
            if (link.destination, link.source) not in directed:
                back = f"a link from {link.destination} to {link.source} as well"
                raise RuleError(
                    ("links", index), [link.source, link.destination], back, "Add it, or leave one_way out here"
                )
        return self

    @model_validator(mode="after")
    def _paths_follow_links(self) -> "GraphConfig":
        directed = {ends for link in self.links for ends in link.directions}
        seen: set[tuple[int, int]] = set()
        for index, path in enumerate(self.paths):
            expected, remedy = self._flaw(path, directed, seen)
            if expected:
                raise RuleError(("paths", index), list(path), expected, remedy)
            seen.add((path[0], path[-1]))
        return self

    @model_validator(mode="after")
    def _all_are_drawn(self) -> "GraphConfig":
        if self.positions is not None and len(self.positions) != self.num_vertices:
            every = f"one position for each of {self.num_vertices} nodes and switches"
            raise RuleError(("positions",), self.positions, every, "Add or remove some")
        if self.positions is not None and len(set(self.positions)) < len(self.positions):
            raise RuleError(("positions",), self.positions, "positions that differ", "Move what lies on another")
        return self

    @model_validator(mode="after")
    def _makes_one_network(self) -> "GraphConfig":
        from jaxmoe.hardware import TopologyError  # with JAX, only where a graph is given

        try:
            as_graph(self)
        except TopologyError as error:
            links = [[link.source, link.destination] for link in self.links]
            raise RuleError(
                ("links",), links, f"links that join all nodes ({error})", "Add the missing links"
            ) from error
        return self

    def _flaw(
        self, path: tuple[int, ...], directed: set[tuple[int, int]], seen: set[tuple[int, int]]
    ) -> tuple[str, str]:
        """Check a path: returns what was expected and the remedy, empty strings if the path is valid."""
        if len(path) < 2 or len(set(path)) < len(path) or max(path[0], path[-1]) >= self.nodes:
            between = f"the way from one of the nodes 0..{self.nodes - 1} to another, and no vertex twice"
            return between, "Write all nodes and switches on it, both ends included"
        for step in pairwise(path):
            if step not in directed:
                return "a path over links that are there", f"Add one from {step[0]} to {step[1]} or change the path"
        if (path[0], path[-1]) in seen:
            return "one path from a node to another", "Remove this one or the one before"
        return "", ""

    def _check_ends(self, where: tuple[str | int, ...], link: GraphLink) -> None:
        for key, vertex in (("from", link.source), ("to", link.destination)):
            if vertex >= self.num_vertices:
                known = f"one of 0..{self.num_vertices - 1}"
                remedy = f"Nodes are 0..{self.nodes - 1}, switches come after them; raise nodes or switches for more"
                raise RuleError((*where, key), vertex, known, remedy)
        if link.source == link.destination:
            raise RuleError((*where, "to"), link.destination, "another end than from", "Name the two ends of the link")


def as_graph(config: GraphConfig) -> "Graph":
    """The network in B/s and s. Raises `TopologyError` where it is not one."""
    import jax.numpy as jnp

    from jaxmoe.hardware import build_graph

    directed = [(ends, link) for link in config.links for ends in link.directions]
    graph = build_graph(
        config.nodes,
        [ends for ends, _ in directed],
        [link.bandwidth_GB_per_s * GIGA for _, link in directed],
        [link.latency_ns * NANO for _, link in directed],
        _circles(config.nodes, config.switches) if config.positions is None else np.array(config.positions, float),
        {(path[0], path[-1]): path for path in config.paths},
    )
    if all(isinstance(link.burst_B, float) and link.burst_B == 0 for link in config.links):
        return graph
    return replace(graph, link_burst=jnp.asarray([link.burst_B for _, link in directed], jnp.float32))


def _circles(nodes: int, switches: int) -> Float[np.ndarray, "vertex 2"]:
    """Nodes on a circle, about a unit apart, and switches on one half as wide; a single switch in its middle."""
    radius = max(nodes / (2 * math.pi), 1)
    return np.concatenate([radius * _points(nodes), radius / 2 * (switches > 1) * _points(switches)])


def _points(count: int) -> Float[np.ndarray, "vertex 2"]:
    """Points on the unit circle, the first on top, clockwise."""
    angle = 2 * math.pi * np.arange(count) / max(count, 1)
    return np.stack([np.sin(angle), -np.cos(angle)], axis=1)
