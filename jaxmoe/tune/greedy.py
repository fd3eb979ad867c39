"""Greedy construction: experts in order of falling load each take the hosts that cost the least at that moment.

Candidates are the nodes nearest to each node, so many as any of a few sizes says, the expert divided evenly
among them. A candidate is scored exactly on all experts placed so far. Compute counts as the even time at
least: else the first experts would be spread over the whole machine, because no other is placed yet.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.traces import MISSING, Batch, over_batches
from jaxmoe.tune.local_search import Search
from jaxmoe.tune.problem import BRIM, PlacementProblem, objective
from jaxmoe.tune.referee import Referee
from jaxmoe.tune.result import History, Progress, TuneResult, silent
from jaxmoe.tune.settings import StopSwitch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # hosts of one expert
LARGEST = 2.0  # most hosts of an expert, relative to how many nodes its work would fill


@dataclass(frozen=True)
class GreedySettings:
    """What a choice of hosts is judged on."""

    batches: int = 16
    seed: int = 0
    time_limit_s: float | None = None


def greedy(problem: PlacementProblem, settings: GreedySettings, progress: Progress = silent) -> TuneResult:
    """Place expert after expert. Once Ctrl-C or the time limit strikes, the others go whole to the idlest nodes."""
    with StopSwitch(settings.time_limit_s) as stop:
        referee, history = Referee(problem, settings.seed, stop, progress), History()
        layers, experts = problem.frequency.shape
        with referee.timed("greedy"):
            batches, reached = referee.draw(settings.batches), np.full((layers, experts), np.nan)
            plans = np.stack([_place(referee, layer, batches, reached) for layer in range(layers)])
            for step in range(experts):
                history.add(step + 1, reached[:, step])
            plans = referee.legal(plans[:, None])
            scores = referee.score(plans)
        stages = {"constructed": scores[:, 0]}
        with referee.timed("rebalance"):
            plans, _ = referee.rebalance(plans, scores)
        return referee.conclude(plans[:, 0], stages, {"greedy": history} if not np.isnan(reached).any() else {})


def _place(
    referee: Referee, layer: int, batches: Batch, reached: Float[np.ndarray, "layer expert"]
) -> Float[np.ndarray, "expert node"]:
    """The plan of one layer; the cost after each choice is written to `reached`."""
    problem = referee.problem
    frequency, nodes = problem.frequency[layer], problem.num_nodes
    even = problem.batch_tokens * problem.trace.top_k * float(problem.model.costs.flops_per_token_expert)
    even /= float(np.asarray(problem.model.machine.die.flops, float).sum())
    here = jax.tree.map(lambda leaf: leaf[layer], batches)
    # The same sizes for all layers: one function to compile.
    sizes = _sizes(problem.frequency.max(), nodes)
    near = _neighbourhoods(np.asarray(problem.model.machine.topology.hop_counts()), sizes)
    candidates, even_s = jnp.asarray(near, jnp.float32), jnp.asarray(even, jnp.float32)
    share = np.zeros((len(frequency), nodes))
    for step, expert in enumerate(np.argsort(-frequency, kind="stable")):
        if referee.stop.reason:
            share[expert, (frequency @ share).argmin()] = 1
            continue
        placed = jnp.asarray(share, jnp.float32)
        costs = _costs(referee.search, placed, candidates, jnp.asarray(expert), here, even_s)
        chosen = int(np.asarray(costs).argmin())
        share[expert], reached[layer, step] = near[chosen], costs[chosen]
        referee.progress("greedy", layer * len(frequency) + step + 1, problem.frequency.size)
    return share


def _sizes(largest: float, nodes: int) -> list[int]:
    """Numbers of hosts that make sense where the most frequent expert is so much of the work."""
    most = min(nodes, max(1.0, LARGEST * largest * nodes))
    return [size for size in SIZES if size <= most]


def _neighbourhoods(hops: Int[np.ndarray, "node node2"], sizes: list[int]) -> Float[np.ndarray, "candidate node"]:
    """Shares of an expert that is divided evenly among the nodes nearest to each node."""
    order = np.argsort(hops, axis=1, kind="stable")
    near = np.zeros((len(sizes), *hops.shape))
    for made, size in zip(near, sizes, strict=True):
        np.put_along_axis(made, order[:, :size], 1 / size, axis=1)
    return np.unique(near.reshape(-1, len(hops)), axis=0)[::-1]


@eqx.filter_jit
def _costs(
    search: Search,
    share: Float[Array, "expert node"],
    candidates: Float[Array, "candidate node"],
    expert: Int[Array, ""],
    batches: Batch,
    even: Float[Array, ""],
) -> Float[Array, " candidate"]:
    """Exact objective, s, of the experts placed so far with `expert` at each of the candidates; inf where one does
    not fit."""

    def cost(hosts: Float[Array, " node"]) -> Float[Array, ""]:
        placed = share.at[expert].set(hosts)
        seconds = _seconds(search, placed, placed.sum(axis=1) > 0, batches, even)
        held = jnp.where(search.model.mode == "replicated", placed > 0, placed)
        fits = (held.sum(axis=0) <= search.room * BRIM).all()
        return jnp.where(fits, objective(seconds, search.p95_weight), jnp.inf)

    return jax.lax.map(cost, candidates, batch_size=32)


def _seconds(
    search: Search,
    share: Float[Array, "expert node"],
    placed: Bool[Array, " expert"],
    batches: Batch,
    even: Float[Array, ""],
) -> Float[Array, " batch"]:
    """Time of every batch as far as its tokens chose experts that have a place."""
    known = jnp.where((batches.experts >= 0) & placed[batches.experts], batches.experts, MISSING)
    anywhere = jnp.zeros_like(share).at[:, 0].set(1)  # for experts without a place, which no token asks for

    def seconds(batch: Batch) -> Float[Array, ""]:
        latency = search.model(jnp.where(placed[:, None], share, anywhere), batch)
        return latency.dispatch + latency.combine + jnp.maximum(latency.compute, even)

    return over_batches(seconds, eqx.tree_at(lambda batch: batch.experts, batches, known))
