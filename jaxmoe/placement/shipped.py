"""The strategies that ship with jaxmoe, each with the exchanges that it may run under."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.placement.exchange import Rings
from jaxmoe.placement.groups import groups_of
from jaxmoe.placement.strategies import (
    Frequency,
    Shares,
    expert_parallel,
    expert_parallel_balanced,
    expert_parallel_random,
    in_groups,
    replicated_by_load,
    tensor_parallel,
)


class Shipped(NamedTuple):
    """A strategy by name: shares [layer, expert, node], meant as sharded, and names of exchanges."""

    name: str
    share: Shares
    exchanges: tuple[str, ...]


def shipped_strategies(
    frequency: Frequency, topology: AbstractTopology, gathers: Sequence[str], seed: int
) -> list[Shipped]:
    """Tensor parallelism, expert parallelism three ways, and every complete hybrid; `gathers` are for any plan."""
    layers, experts = frequency.shape
    nodes, any_plan = topology.num_nodes, tuple(gathers)
    return [
        Shipped("tp", tensor_parallel(layers, experts, nodes), ("ring_both_ways", "ring", *any_plan)),
        Shipped("ep_random", expert_parallel_random(layers, experts, nodes, seed), any_plan),
        Shipped("ep_balanced", expert_parallel_balanced(frequency, nodes), any_plan),
        Shipped("ep", expert_parallel(frequency, topology), any_plan),
        *(
            Shipped(
                f"hybrid_{rings.name[6:]}", in_groups(frequency, groups_of(rings, topology)), (rings.name, *any_plan)
            )
            for rings in complete_hybrids(topology, experts)
        ),
    ]


def shipped_replicas(
    frequency: Frequency, room: Float[np.ndarray, " node"], gathers: Sequence[str], seed: int
) -> list[Shipped]:
    """Replicated strategies: whole experts, and replicas by load in all slots that memory has."""
    layers, experts = frequency.shape
    any_plan, nodes = tuple(gathers), len(room)
    plans = [
        Shipped("ep_random", expert_parallel_random(layers, experts, nodes, seed), any_plan),
        Shipped("ep_balanced", expert_parallel_balanced(frequency, nodes), any_plan),
    ]
    slots = np.minimum(room, experts).astype(int)
    return [*plans, Shipped("replicated_by_load", replicated_by_load(frequency, slots), any_plan)]


def complete_hybrids(topology: AbstractTopology, experts: int) -> list[Rings]:
    """Rings both ways inside equal groups of two nodes or more, of which there are two or more, but not more than
    experts.

    On a mesh groups are rectangles cut along x and along y, else successive nodes.
    """
    if isinstance(topology, Mesh):
        x, y = topology.shape
        cuts: list[tuple[int, ...]] = [(a, b) for a in range(1, x + 1) for b in range(1, y + 1) if not (x % a or y % b)]
    else:
        cuts = [(count,) for count in range(1, topology.num_nodes + 1) if topology.num_nodes % count == 0]
    rings = [Rings(cut, both_ways=True) for cut in cuts]
    return [ring for ring in rings if 2 <= ring.count <= min(experts, topology.num_nodes // 2)]
