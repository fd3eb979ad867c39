"""A time that no placement of a layer beats, as long as tokens gather at one node.

Suppose a plan computes in c seconds on average. Then no node has more than c seconds of average work, so the
experts of a token, having so much work together, must live on at least so many nodes; the token visits all
of them, and every visit but one is a message of at least one hop, of more hops as the near nodes are used
up. All links together must carry these hops, there and back. Hence c + 2 T(c) with T falling in c, and the
bound is its least value over all c. It holds for averages over the very batches given, because the mean of
the slowest node's or link's time is at least the time of the slowest mean.
"""

import numpy as np
from jaxtyping import Float

from jaxmoe.traces import Batch
from jaxmoe.tune.problem import PlacementProblem

GRID = 512  # values of c between even work and one node for every token


def lower_bound(problem: PlacementProblem, batches: Batch) -> Float[np.ndarray, " layer"]:
    """Bound on the mean total time of every layer over `batches` [layer, batch, token, ...] (or merged ones), s.

    It bounds the mean, whatever weight the problem gives to the tail, of sharded plans under the gather
    rules, not of ring collectives. Latencies, chunks and memory bandwidth are left out: they only add.
    """
    experts, weight = np.asarray(batches.experts), np.asarray(batches.weight, float)
    return np.array([_layer_bound(problem, experts[i], weight[i]) for i in range(len(experts))])


def _layer_bound(problem: PlacementProblem, experts: np.ndarray, weight: Float[np.ndarray, "batch token"]) -> float:
    model, batches = problem.model, len(weight)
    rows = np.sort(np.broadcast_to(experts, (*weight.shape, experts.shape[-1])), axis=-1)
    choices, index = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
    often = np.bincount(index.ravel(), weight.ravel()) / batches  # mean tokens of a batch with this choice
    chosen = np.where(choices < 0, problem.trace.num_experts, choices)
    work = np.zeros(problem.trace.num_experts + 1)
    np.add.at(work, chosen, often[:, None])
    work[-1] = 0
    flops = work * float(model.costs.flops_per_token_expert)  # mean FLOPs of every expert in a batch
    return _least(problem, flops[chosen].sum(axis=1), (choices >= 0).sum(axis=1), often, flops.sum())


def _least(
    problem: PlacementProblem, needed: np.ndarray, held: np.ndarray, often: np.ndarray, all_flops: float
) -> float:
    """Least c + 2 T(c), for choices that have `needed` FLOPs and `held` experts and occur `often`."""
    rates = np.sort(np.asarray(problem.model.machine.die.flops, float))[::-1]
    reach, room = np.cumsum(rates), np.cumsum(np.sort(problem.room)[::-1])
    even, alone = all_flops / reach[-1], max(needed.max() / rates[0], all_flops / reach[-1])
    grid = np.append(np.geomspace(even, alone, GRID), np.inf)
    for_memory = np.searchsorted(room, held * (1 - 1e-6))
    # Between two values of the grid, c is at least the lower and T at least that of the upper.
    comm = [
        _comm(problem, np.maximum(np.searchsorted(reach * c, needed * (1 - 1e-6)), for_memory), often) for c in grid[1:]
    ]
    return float(np.min(grid[:-1] + 2 * np.array(comm)))


def _comm(problem: PlacementProblem, others: np.ndarray, often: np.ndarray) -> float:
    """Least seconds of combine when choices that occur `often` visit that many nodes beside the gather node."""
    topology = problem.model.machine.topology
    nearest = np.sort(topology.hop_counts(), axis=1)
    hops = nearest.cumsum(axis=1).min(axis=0)  # least hops in all to so many other nodes
    sent = float(often @ hops[np.minimum(others, len(hops) - 1)]) * float(problem.model.costs.combine_bytes)
    return sent / float(np.asarray(topology.link_bandwidth, float).sum())
