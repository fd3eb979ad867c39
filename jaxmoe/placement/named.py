"""Placement strategies by name, registered in `jaxmoe.registry.STRATEGIES`.

A strategy is a function from how often experts were chosen, the network and the settings of a run to shares:

    @STRATEGIES.register("even_runs")
    def even_runs(counts, topology, settings):
        return share  # float [layer, expert, node], rows sum to 1

It is then one of the usual placements that commands compare. A `PlacementStrategy` states more than a function can:
its exchange, whether shares are replicas, and what a reader has to know.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.hardware.cuts import square_cut
from jaxmoe.placement.copies import Copies
from jaxmoe.placement.exchange import Rings
from jaxmoe.placement.placement import Mode
from jaxmoe.placement.regions import region_copies, regions_named
from jaxmoe.placement.strategies import (
    expert_parallel,
    expert_parallel_balanced,
    expert_parallel_random,
    groups_of,
    in_groups,
    tensor_parallel,
)
from jaxmoe.registry import STRATEGIES
from jaxmoe.traces.statistics import expert_runs


class StrategySettings(NamedTuple):
    """Settings that a placement strategy takes besides expert loads and network."""

    seed: int
    regions: int  # equal groups of a hybrid


Counts = Int[np.ndarray, "layer expert"]  # how often every expert was chosen
Share = Callable[[Counts, AbstractTopology, StrategySettings], Float[np.ndarray, "layer expert node"] | Copies]


@dataclass(frozen=True)
class PlacementStrategy:
    """A function from loads, network and settings to shares, or to copies of experts, and what goes with them.

    `exchange` is its name, or a function of network and settings to it; `None` is the exchange of the scenario. `note`
    is what a reader of its figures has to know. One that is not `compared` is there where it is asked for by name.
    """

    share: Share
    exchange: str | Callable[[AbstractTopology, StrategySettings], str] | None = None
    mode: Mode = "sharded"
    note: str = ""
    compared: bool = True

    def exchange_on(self, topology: AbstractTopology, settings: StrategySettings) -> str | None:
        """The name of its exchange on a network."""
        return self.exchange(topology, settings) if callable(self.exchange) else self.exchange


@dataclass(frozen=True)
class StrategyFamily:
    """Strategies whose names fit a template, each made of its name."""

    named: Callable[[str], PlacementStrategy]


def strategy_named(name: str) -> PlacementStrategy:
    """The strategy of this name. Raises `InputError` where there is none."""
    part = STRATEGIES[name]
    if isinstance(part, StrategyFamily):
        return part.named(name)
    return part if isinstance(part, PlacementStrategy) else PlacementStrategy(part)


def compared_strategies() -> tuple[str, ...]:
    """The names of the strategies that every comparison has."""
    return tuple(name for name in STRATEGIES.names if strategy_named(name).compared)


def region_rings(topology: AbstractTopology, settings: StrategySettings) -> Rings:
    """Rings inside equal groups: rectangles of a mesh, else successive nodes."""
    if isinstance(topology, Mesh):
        return Rings(square_cut(topology.shape, settings.regions))
    return Rings((settings.regions,))


def _everywhere(counts: Counts, topology: AbstractTopology, settings: StrategySettings) -> np.ndarray:
    layers, experts = counts.shape
    return tensor_parallel(layers, experts, topology.num_nodes)


def _at_random(counts: Counts, topology: AbstractTopology, settings: StrategySettings) -> np.ndarray:
    layers, experts = counts.shape
    return expert_parallel_random(layers, experts, topology.num_nodes, settings.seed)


def _by_number(counts: Counts, topology: AbstractTopology, settings: StrategySettings) -> np.ndarray:
    layers, experts = counts.shape
    return expert_runs(layers, experts, topology.num_nodes)


def _in_regions(counts: Counts, topology: AbstractTopology, settings: StrategySettings) -> np.ndarray:
    return in_groups(counts, groups_of(region_rings(topology, settings), topology))


TP = PlacementStrategy(_everywhere, "ring")  # hd_moe Eq. 4: one way round
TP_BOTH_WAYS = PlacementStrategy(_everywhere, "ring_both_ways")
EP_RANDOM = PlacementStrategy(_at_random)
EP_BALANCED = PlacementStrategy(lambda counts, topology, settings: expert_parallel_balanced(counts, topology.num_nodes))
EP = PlacementStrategy(lambda counts, topology, settings: expert_parallel(counts, topology))
HYBRID = PlacementStrategy(_in_regions)
HYBRID_RING = PlacementStrategy(
    _in_regions,
    lambda topology, settings: replace(region_rings(topology, settings), between=False).name,
)
HYBRID_COMPLETE = PlacementStrategy(
    _in_regions, lambda topology, settings: replace(region_rings(topology, settings), both_ways=True).name
)
# Whole experts in equal runs by number, as engines place them that do not look at loads.
EP_RUNS = PlacementStrategy(_by_number, compared=False)


def _regions(name: str) -> PlacementStrategy:
    regions = regions_named(name)
    return PlacementStrategy(
        lambda counts, topology, settings: region_copies(regions, counts, topology), compared=False
    )


REGIONS = StrategyFamily(_regions)
