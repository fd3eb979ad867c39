"""Lower bounds on the time of any plan that a tuner may return, whatever the placement and the exchange.

Suppose a sharded plan computes in c seconds on average. Then no node has more than c seconds of average work, nor
reads more than c seconds of weights, so the experts of a token, having so much work and weight together, must live on
at least so many nodes. The token visits all of them, and each element of its result is a sum of a part from every one:
all parts but one must be sent over a link at least, whether they gather, merge in a tree or go round a ring. All links
together must carry these vectors, and all ports, there and back. Hence c + 2 T(c) with T falling in c, and the bound is
its least value over all c. It holds for averages over the very batches given, because the mean of the slowest node's or
link's time is at least the time of the slowest mean.

Nor is c below what the nearest memory takes, where a node with however small a part of an expert moves the vectors of
all its tokens.

Replicated, a token may find all it needs on one node; what is left is even work.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.engine import IdleLinks, Serial
from jaxmoe.network import Congestion
from jaxmoe.traces import Batch, expert_counts
from jaxmoe.tune.problem import PlacementProblem

BISECTIONS = 50
GRID = 512  # values of c between even work and one node for every token


class _Load(NamedTuple):
    """Work on one kind of resource: an amount for every expert, and the rate of each server."""

    amount: Float[np.ndarray, " expert+1"]  # mean of a batch; the last is for missing choices
    rates: Float[np.ndarray, " server"]  # falling

    @property
    def even(self) -> float:
        return float(self.amount.sum() / self.rates.sum())


class _Links(NamedTuple):
    """Loads of links and ports that no plan avoids."""

    vectors: float  # B of dispatch and combine together, of one visit
    hops: Float[np.ndarray, " others"]  # fewest links that vectors from so many other nodes pass in all
    link_rate: float  # of all links together, B/s
    port_rates: list[float]  # of all ports together, out of nodes and into them
    unicast: bool  # else a tree's home receives one vector for all

    @classmethod
    def of(cls, problem: PlacementProblem) -> "_Links":
        topology, costs = problem.model.machine.topology, problem.model.costs
        return cls(
            vectors=float(costs.dispatch_bytes) + float(costs.combine_bytes),
            hops=_least_hops(problem),
            link_rate=_sum(topology.link_rate),
            port_rates=[_sum(port) for port in (topology.injection_rate, topology.ejection_rate) if port is not None],
            unicast=_only_unicasts(problem),
        )

    def seconds(self, others: Int[np.ndarray, " choice"], often: Float[np.ndarray, " choice"]) -> float:
        """Least time of dispatch and combine when choices that occur `often` visit so many nodes beside the first."""
        others = np.minimum(others, len(self.hops) - 1)
        sent = float(often @ (others if self.unicast else others > 0))
        on_links = float(often @ self.hops[others]) / self.link_rate
        return self.vectors * max([on_links, *(sent / port for port in self.port_rates)])


def lower_bound(problem: PlacementProblem, batches: Batch) -> Float[np.ndarray, " layer"]:
    """Bound on the mean total time of every layer over `batches` [layer, batch, token, ...] (or merged ones), s.

    It bounds the mean, whatever weight the problem gives to the tail or to the worst topic. Latencies, chunks, start-up
    times and tiles are left out: they only add. Communication is left out under time models without congestion, and
    where the model's own exchange is not complete.
    """
    experts, weight = np.asarray(batches.experts), np.asarray(batches.weight, float)
    counts = expert_counts(batches, problem.num_experts)
    return np.array([_layer_bound(problem, *layer) for layer in zip(experts, weight, counts, strict=True)])


def bound_if_any(problem: PlacementProblem, batches: Batch) -> Float[np.ndarray, " layer"] | None:
    """The lower bound of every layer, s; `None` where it is 0, which tells nothing.

    So it is where products may be faster than a die's rate and nothing else keeps experts apart.
    """
    bound = lower_bound(problem, batches)
    return bound if bound.any() else None


def _layer_bound(
    problem: PlacementProblem,
    experts: np.ndarray,
    weight: Float[np.ndarray, "batch token"],
    counts: Float[np.ndarray, "batch expert"],
) -> float:
    rows = np.sort(np.broadcast_to(experts, (*weight.shape, experts.shape[-1])), axis=-1)
    choices, index = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
    often = np.bincount(index.ravel(), weight.ravel()) / len(weight)  # mean tokens of a batch with this choice
    chosen = np.where(choices < 0, problem.num_experts, choices)
    loads = _loads(problem, counts)
    even = max(load.even for load in loads)
    if problem.model.mode == "replicated" or problem.serving is not None:
        return even  # a token may find all its experts on one node
    even = max(even, _moving(problem, counts))
    needed = [load.amount[chosen].sum(axis=1) for load in loads]
    alone = max(even, *(float(need.max() / load.rates[0]) for need, load in zip(needed, loads, strict=True)))
    held, room = (choices >= 0).sum(axis=1), np.cumsum(np.sort(problem.room)[::-1])
    others = np.searchsorted(room, held * (1 - 2e-5))
    # Where compute is not bounded, only memory keeps all experts of a token from one node.
    grid = np.append(np.geomspace(even, alone, GRID) if even > 0 else np.zeros(1), np.inf)
    # Between two values of the grid, c is at least the lower and T at least that of the upper.
    totals = []
    reach, links = [np.cumsum(load.rates) for load in loads], _Links.of(problem) if _loads_links(problem) else None
    serial = isinstance(problem.model.schedule, Serial | IdleLinks)
    for least_c, c in pairwise(grid):
        spread = [np.searchsorted(rates * c, need * (1 - 1e-6)) for need, rates in zip(needed, reach, strict=True)]
        comm = 0.0 if links is None else links.seconds(np.maximum.reduce([others, *spread]), often)
        totals.append(least_c + comm if serial else max(least_c, comm))
    return float(np.min(totals))


def _loads(problem: PlacementProblem, counts: Float[np.ndarray, "batch expert"]) -> list[_Load]:
    """FLOPs on dies, and weights on the channels of every memory level."""
    machine, costs = problem.model.machine, problem.model.costs
    count = np.pad(counts, ((0, 0), (0, 1)))
    bounded = machine.die.gemm is None or machine.die.gemm.within_rate
    flops = count.mean(axis=0) * float(costs.flops_per_token_expert) * (1.0 if bounded else 0.0)
    loads = [_Load(flops, _falling(machine.die.flops))]
    read = np.minimum(count, 1).mean(axis=0) * float(costs.expert_bytes)
    for level in machine.memory:
        if np.isfinite(np.asarray(level.bandwidth)).all():
            loads.append(_Load(read, _falling(level.bandwidth)))
    return loads


def _moving(problem: PlacementProblem, counts: Float[np.ndarray, "batch expert"]) -> float:
    """Least mean seconds in which the nearest memory moves weights and hidden vectors of a sharded plan.

    A channel with any part of an expert moves the vectors of all its tokens. In c seconds, a channel that moves b in a
    second has time for weights of c b - v at most, where v are the vectors of any of its experts. So every byte of an
    expert's weights takes up at least 1 / (c b - v) of a channel, of the fastest, and all bytes no more than there are.
    """
    machine, costs = problem.model.machine, problem.model.costs
    if not machine.memory or not np.isfinite(np.asarray(machine.memory[0].bandwidth)).all():
        return 0.0
    bandwidth = np.asarray(machine.memory[0].bandwidth, float)
    fastest, channels = bandwidth.max(), bandwidth.sum() / bandwidth.max()
    weights = np.minimum(counts, 1) * float(costs.expert_bytes)
    vectors = counts * (float(costs.dispatch_bytes) + float(costs.combine_bytes))
    low = vectors.max(axis=1) / fastest
    high = low + weights.sum(axis=1) / bandwidth.sum()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        room = np.maximum(middle[:, None] * fastest - vectors, 1e-300)
        enough = np.divide(weights, room, out=np.zeros_like(room), where=weights > 0).sum(axis=1) <= channels
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return float(low.mean())


def _falling(rates: object) -> Float[np.ndarray, " server"]:
    return np.sort(np.asarray(rates, float))[::-1]


def _loads_links(problem: PlacementProblem) -> bool:
    """Whether every vector has to pass a link that it keeps busy for others."""
    return isinstance(problem.model.time_model, Congestion) and problem.model.exchange.complete


def _sum(values: object) -> float:
    return float(np.asarray(values, float).sum())


def _least_hops(problem: PlacementProblem) -> Float[np.ndarray, " others"]:
    """Fewest links that vectors from so many other nodes pass in all."""
    if not _only_unicasts(problem):
        return np.arange(problem.num_nodes, dtype=float)  # merged on the way, each passes one link at least
    nearest = np.sort(np.asarray(problem.model.machine.topology.hop_counts()), axis=0)  # from others to each node
    return nearest.cumsum(axis=0).min(axis=1).astype(float)


def _only_unicasts(problem: PlacementProblem) -> bool:
    """Whether every exchange that may be chosen sends whole vectors to one node."""
    return not problem.hybrids and all(exchange.unicast for exchange in problem.named.values())
