"""The strategies that ship with jaxmoe: equal groups of nodes, shares dealt to them, exchanges they may have."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Real

from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.cuts import blocks, cut_blocks, ring_order
from jaxmoe.placement.exchange import ExchangeError, Rings
from jaxmoe.placement.placement import PlanError

# Equal groups of the nodes of a machine, and rings through them.


def groups_of(rings: Rings, topology: AbstractTopology) -> np.ndarray:
    """Group of every node, int [node]: rectangles of a mesh, or successive nodes of any machine.

    Raises `ExchangeError` where the groups do not divide the machine.
    """
    if len(rings.groups) == 2 and topology.grid is None:
        raise ExchangeError(
            f"exchange {rings.name} cuts a mesh into rectangles, and the network is a {type(topology).__name__}; "
            f"use rings_{rings.count}"
        )
    try:
        return equal_groups(rings.groups, topology.num_nodes, topology.grid)
    except ValueError as error:
        between = ":" if len(rings.groups) == 2 else ""
        raise ExchangeError(f"exchange {rings.name}{between} {error}") from None


def equal_groups(cut: Sequence[int], nodes: int, grid: tuple[int, int] | None) -> Int[np.ndarray, " node"]:
    """Group of every node: rectangles of a grid, so many along x and along y, or so many runs of successive nodes.

    Raises `ValueError` where the groups do not divide the nodes.
    """
    if len(cut) == 2 and grid is not None:
        return cut_blocks(grid, (cut[0], cut[1]))
    (count,) = cut
    if nodes % count:
        legal = ", ".join(str(count) for count in range(1, nodes + 1) if nodes % count == 0)
        raise ValueError(f"needs equal groups of {nodes} nodes; use one of {legal}")
    return np.arange(nodes) // (nodes // count)


def ring_orders(rings: Rings, topology: AbstractTopology) -> np.ndarray:
    """The nodes of every group in ring order, int [group, place on the ring].

    In a rectangle of a mesh neighbours on the ring are neighbours in the mesh, where such a cycle exists; in other
    groups nodes come in the order of their numbers.
    """
    group = groups_of(rings, topology)
    members = [np.flatnonzero(group == index) for index in range(rings.count)]
    if topology.grid is not None and (len(rings.groups) == 2 or rings.count == 1):
        return np.stack([ring_order(topology.grid, nodes) for nodes in members])
    return np.stack(members)


# The usual placements to compare with: shares float32 [layer, expert, node], meant as sharded.
#
# The four baselines of hd_moe V-A2: tensor parallelism, expert parallelism dealt at random or balanced by load, and
# the hybrid of both. None of them looks at memory; `check_fits` does.

ROUNDING = 1e-9  # of all work

Shares = Float32[np.ndarray, "layer expert node"]
Frequency = Real[np.ndarray, "layer expert"]
Pace = Float[np.ndarray, " node"]  # work that nodes do in equal time, in any unit


def tensor_parallel(layers: int, experts: int, nodes: int, pace: Pace | None = None) -> Shares:
    """Every expert shared by all nodes, evenly or by their `pace`."""
    part = np.full(nodes, 1 / nodes) if pace is None else pace / pace.sum()
    return np.broadcast_to(part.astype(np.float32), (layers, experts, nodes)).copy()


def expert_parallel_random(layers: int, experts: int, nodes: int, seed: int) -> Shares:
    """Whole experts dealt at random, each layer for itself; the nodes' counts differ by at most one.

    The same seed gives the same shares.
    """
    rng = np.random.default_rng(seed)
    # The nodes in random order, round and round, until every expert has one; then random experts to them.
    hosts = [rng.permutation(np.resize(rng.permutation(nodes), experts)) for _ in range(layers)]
    return np.eye(nodes, dtype=np.float32)[np.stack(hosts)]


def expert_parallel_balanced(frequency: Frequency, nodes: int, pace: Pace | None = None) -> Shares:
    """Whole experts, each layer balanced by `frequency` [layer, expert], in any unit.

    Experts in order of falling frequency (the lower number first among equals) go to the node that would be
    done with it first; among equals, to the one with less work so far, then with fewer experts, then to the lower
    number (longest processing time first, Graham 1969). `pace` says how much work nodes do in equal time, by default
    all the same. Counts per node are not kept even: experts that were never chosen all go to the idlest node. Raises
    `PlanError` when a frequency is negative or not finite.
    """
    return np.eye(nodes, dtype=np.float32)[_balanced(frequency, np.ones(nodes) if pace is None else pace)]


def hybrid(frequency: Frequency, shape: tuple[int, int], regions: int) -> Shares:
    """Hybrid TP-EP with compute balance (hd_moe V-A2).

    The mesh is cut into `regions` equal rectangles (`hardware.cuts.blocks`). Every expert lives in one of
    them, chosen as in `expert_parallel_balanced`, and is shared evenly by its nodes. Raises `ValueError`
    when the mesh cannot be cut so, and `PlanError` for frequencies as above.
    """
    return in_groups(frequency, blocks(shape, regions))


def in_groups(frequency: Frequency, group: Int[np.ndarray, " node"], pace: Pace | None = None) -> Shares:
    """Whole experts dealt to equal groups of nodes by load, each shared by the nodes of its group.

    `group` numbers the groups from 0. Dealt as in `expert_parallel_balanced`; raises `PlanError` as it does. Nodes
    share evenly, or by their `pace`.
    """
    member = (group == np.arange(group.max() + 1)[:, None]) * (np.ones(len(group)) if pace is None else pace)
    total = member.sum(axis=1, keepdims=True)
    return (member / total).astype(np.float32)[_balanced(frequency, total[:, 0])]


def expert_parallel(frequency: Frequency, topology: AbstractTopology) -> Shares:
    """Expert parallelism over all nodes: with fewer experts than nodes, each expert gets an equal part of the nodes.

    Parts are rectangles where they cut the mesh, else successive nodes, a node on a border being shared. With as many
    experts as nodes or more it is `expert_parallel_balanced`.
    """
    return expert_parallel_on(frequency, topology.num_nodes, topology.grid)


def expert_parallel_on(frequency: Frequency, nodes: int, grid: tuple[int, int] | None) -> Shares:
    """Expert parallelism, as `expert_parallel`, over so many nodes, or over those of a grid."""
    experts = frequency.shape[1]
    if experts >= nodes:
        return expert_parallel_balanced(frequency, nodes)
    try:
        group = None if grid is None else blocks(grid, experts)
    except ValueError:
        group = None
    if group is not None:
        part = (group == np.arange(experts)[:, None]) * experts / nodes
    else:
        even, order = np.full(experts, 1 / experts), np.arange(experts)
        part = filled_in_order(even, np.full(nodes, 1 / nodes), order, np.arange(nodes))
    return np.broadcast_to(part.astype(np.float32), (len(frequency), experts, nodes)).copy()


def replicated_by_load(frequency: Frequency, slots: Int[np.ndarray, " node"]) -> Shares:
    """Replicas for the experts of the most load per replica, until all `slots` are full; served evenly.

    Replicas go, in order of falling load, to the node of the least load so far that has a slot left and no replica of
    the same expert; greedy balancing as of load-balancing replicas in serving engines. Raises `PlanError` where the
    experts do not fit the slots.
    """
    frequency = np.asarray(frequency, np.float64)
    if slots.sum() < frequency.shape[1]:
        raise PlanError(
            f"{frequency.shape[1]} experts do not fit {slots.sum()} slots; raise the memory capacity, or use more nodes"
        )
    return np.stack([_replicated_layer(layer, slots) for layer in frequency]).astype(np.float32)


def _replicated_layer(frequency: np.ndarray, slots: np.ndarray) -> np.ndarray:
    experts, nodes = len(frequency), len(slots)
    replicas = np.ones(experts, int)
    for _ in range(int(slots.sum()) - experts):
        load = np.where(replicas < nodes, frequency / replicas, -1)
        if load.max() < 0:
            break
        replicas[load.argmax()] += 1
    share, work, left = np.zeros((experts, nodes)), np.zeros(nodes), slots.astype(int)
    for expert in np.argsort(-frequency / replicas, kind="stable"):
        for _ in range(replicas[expert]):
            able = (left > 0) & (share[expert] == 0)
            if not able.any():
                continue
            node = np.where(able, work, np.inf).argmin()
            share[expert, node], left[node] = 1, left[node] - 1
            work[node] += frequency[expert] / replicas[expert]
    return share / share.sum(axis=1, keepdims=True)


def filled_in_order(
    frequency: Float[np.ndarray, " expert"],
    node_part: Float[np.ndarray, " node"],
    experts: Int[np.ndarray, " expert"],
    nodes: Int[np.ndarray, " node"],
) -> Float[np.ndarray, "expert node"]:
    """The experts, one after the other in the order given, fill the nodes in theirs: the north-west corner rule.

    Both inputs sum to 1; every node has exactly its part of the work, and at most E + N - 1 shares are not 0.
    """
    work, room = np.cumsum(frequency[experts]), np.cumsum(node_part[nodes])
    ends = np.minimum(work[:, None], room)
    starts = np.maximum((work - frequency[experts])[:, None], room - node_part[nodes])
    overlap = np.empty((len(experts), len(nodes)))
    overlap[np.ix_(experts, nodes)] = np.maximum(ends - starts, 0)
    overlap[overlap < ROUNDING] = 0  # borders that coincide but for rounding make no host
    return overlap / overlap.sum(axis=1, keepdims=True)


def _balanced(frequency: Frequency, pace: Pace) -> np.ndarray:
    """Bin of every expert, int [layer, expert]; `pace` is that of the bins."""
    frequency = np.asarray(frequency, np.float64)
    if not np.isfinite(frequency).all() or (frequency < 0).any():
        raise PlanError("frequency holds negative or non-finite values; count choices in a trace")
    return np.stack([_balanced_layer(layer, pace / pace.max()) for layer in frequency])


def _balanced_layer(frequency: np.ndarray, pace: np.ndarray) -> np.ndarray:
    work, experts, hosts = np.zeros(len(pace)), np.zeros(len(pace), int), np.empty(frequency.size, np.int64)
    for expert in np.argsort(-frequency, kind="stable"):
        done = (work + frequency[expert]) / pace
        hosts[expert] = host = np.lexsort((experts, work / pace, done))[0]
        work[host] += frequency[expert]
        experts[host] += 1
    return hosts


class Shipped(NamedTuple):
    """A strategy by name: shares [layer, expert, node], meant as sharded, and names of exchanges."""

    name: str
    share: Shares
    exchanges: tuple[str, ...]
    rings: Rings | None = None  # of a complete hybrid
    by_pace: bool = False  # whether work is dealt by how fast nodes are, not evenly


def shipped_strategies(
    frequency: Frequency, topology: AbstractTopology, gathers: Sequence[str], seed: int, pace: Pace | None = None
) -> list[Shipped]:
    """Sharded strategies: tensor parallelism, three of expert parallelism, and every complete hybrid.

    Each has its share [layer, expert, node] and the exchanges that it can use; `gathers` suit every plan. Where nodes
    are not alike in their `pace`, there are those that deal by it too.
    """
    layers, experts = frequency.shape
    any_plan, nodes = tuple(gathers), topology.num_nodes
    tensor, balanced, *hybrids = _dealt(frequency, topology, any_plan)
    random = Shipped("ep_random", expert_parallel_random(layers, experts, nodes, seed), any_plan)
    named = [tensor, random, balanced, Shipped("ep", expert_parallel(frequency, topology), any_plan), *hybrids]
    return named if pace is None else [*named, *_dealt(frequency, topology, any_plan, pace)]


def _dealt(
    frequency: Frequency, topology: AbstractTopology, gathers: tuple[str, ...], pace: Pace | None = None
) -> list[Shipped]:
    """Tensor, balanced expert and complete hybrid parallelism, evenly or by pace."""
    (layers, experts), nodes = frequency.shape, topology.num_nodes
    by_pace = pace is not None
    made = [
        Shipped("tp", tensor_parallel(layers, experts, nodes, pace), ("ring_both_ways", "ring", *gathers)),
        Shipped("ep_balanced", expert_parallel_balanced(frequency, nodes, pace), gathers),
    ]
    for rings in complete_hybrids(topology, experts):
        share = in_groups(frequency, groups_of(rings, topology), pace)
        name = f"hybrid_{rings.name.removeprefix('rings_')}"
        made.append(Shipped(name, share, (rings.name, *gathers), rings))
    return [each._replace(name=each.name + "_by_pace" * by_pace, by_pace=by_pace) for each in made]


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
    rings = [Rings(cut, both_ways=True) for cut in equal_cuts(topology.num_nodes, topology.grid)]
    return [ring for ring in rings if 2 <= ring.count <= min(experts, topology.num_nodes // 2)]


def equal_cuts(nodes: int, grid: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """All cuts into equal groups that `equal_groups` makes: along x and along y of a grid, else of successive nodes."""
    if grid is not None:
        x, y = grid
        return [(a, b) for a in range(1, x + 1) for b in range(1, y + 1) if not (x % a or y % b)]
    return [(count,) for count in range(1, nodes + 1) if nodes % count == 0]
