"""Searches without gradients: greedy, random plans, and simulated annealing."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.relax import geometric
from jaxmoe.traces import MISSING, Batch, over_batches
from jaxmoe.tune import local_search
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.local_search import Search
from jaxmoe.tune.problem import BRIM, PlacementProblem
from jaxmoe.tune.results import History, Plans, Progress, TuneResult, best, silent
from jaxmoe.tune.settings import StopSwitch

# Greedy construction: experts in order of falling load each take the hosts that cost the least at that moment.
#
# Candidates are the nodes nearest to each node, so many as any of a few sizes says, the expert divided evenly among
# them. A candidate is scored exactly on all experts placed so far. Compute counts as the even time at least: else the
# first experts would be spread over the whole machine, because no other is placed yet.

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # hosts of one expert
LARGEST = 2.0  # most hosts of an expert, relative to how many nodes its work would fill


@dataclass(frozen=True)
class GreedySettings:
    """Batches that score each choice of hosts, the seed that draws them, and the limit of wall time, s."""

    batches: int = 16
    seed: int = 0
    time_limit_s: float | None = None


def greedy(problem: PlacementProblem, settings: GreedySettings, progress: Progress = silent) -> TuneResult:
    """Place expert after expert. Once Ctrl-C or the time limit strikes, the others go whole to the idlest nodes."""
    with StopSwitch(settings.time_limit_s) as stop:
        evaluator, history = Evaluator(problem, settings.seed, stop, progress), History()
        layers, experts = problem.frequency.shape
        with evaluator.timed("greedy"):
            batches, reached = evaluator.draw(settings.batches), np.full((layers, experts), np.nan)
            plans = np.stack([_place(evaluator, layer, batches, reached) for layer in range(layers)])
            for step in range(experts):
                history.add(step + 1, reached[:, step])
            plans = evaluator.legal(plans[:, None])
            evaluator.offer(plans, np.full(plans.shape[:2], np.inf))
            scores = evaluator.score(plans)
        stages = {"constructed": scores[:, 0]}
        with evaluator.timed("rebalance"):
            plans, _ = evaluator.rebalance(plans, scores)
        return evaluator.conclude(plans[:, 0], stages, {"greedy": history} if not np.isnan(reached).any() else {})


def _place(
    evaluator: Evaluator, layer: int, batches: Batch, reached: Float[np.ndarray, "layer expert"]
) -> Float[np.ndarray, "expert node"]:
    """The plan of one layer; the cost after each choice is written to `reached`."""
    problem = evaluator.problem
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
        if evaluator.stop.reason:
            share[expert, (frequency @ share).argmin()] = 1
            continue
        placed = jnp.asarray(share, jnp.float32)
        costs = _costs(evaluator.search, placed, candidates, jnp.asarray(expert), here, even_s)
        chosen = int(np.asarray(costs).argmin())
        share[expert], reached[layer, step] = near[chosen], costs[chosen]
        evaluator.progress("greedy", layer * len(frequency) + step + 1, problem.frequency.size)
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
        return jnp.where(fits, search.aim(seconds), jnp.inf)

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


# Where searches start: legal plans without preference, every node with its even part of the work.


def random_starts(evaluator: Evaluator, candidates: int, seed: int) -> Plans:
    """Plans that fill nodes in random order with experts in random order; the same seed gives the same plans."""
    rng = np.random.default_rng([seed, 2])
    problem = evaluator.problem

    def plan(frequency: np.ndarray) -> np.ndarray:
        order = rng.permutation(len(frequency)), rng.permutation(problem.num_nodes)
        return filled_in_order(frequency, problem.pace, *order)

    return evaluator.legal(np.stack([[plan(layer) for _ in range(candidates)] for layer in problem.frequency]))


# The best of many random plans: what any search has to beat.

SEGMENT = 32  # plans of a compiled call; the time limit is checked in between


@dataclass(frozen=True)
class RandomSettings:
    """Settings of the random search: how many plans are drawn."""

    plans: int = 1024  # of every layer; rounded up to whole segments
    batches: int = 16  # that judge a plan: the same for all
    seed: int = 0
    time_limit_s: float | None = None


def random_search(problem: PlacementProblem, settings: RandomSettings, progress: Progress = silent) -> TuneResult:
    """Draw balanced plans at random and keep the best. Ctrl-C or the time limit ends the drawing."""
    with StopSwitch(settings.time_limit_s) as stop:
        evaluator, history = Evaluator(problem, settings.seed, stop, progress), History()
        with evaluator.timed("random search"):
            batches = evaluator.draw(settings.batches)
            kept = np.zeros((len(problem.frequency), 0, *problem.frequency.shape[1:], problem.num_nodes))
            scores = np.zeros(kept.shape[:2])
            for first in range(0, settings.plans, SEGMENT):
                drawn = random_starts(evaluator, SEGMENT, settings.seed + first)
                costs = local_search.score_candidates(evaluator.search, jnp.asarray(drawn, jnp.float32), batches)
                plans, seconds = np.concatenate([kept, drawn], axis=1), np.concatenate([scores, costs], axis=1)
                kept, scores = best(plans, seconds, 1)
                evaluator.offer(kept, scores)
                history.add(first + SEGMENT, scores[:, 0])
                progress("random search", min(first + SEGMENT, settings.plans), settings.plans)
                if stop.reason:
                    break
        return evaluator.conclude(kept[:, 0], {}, {"random search": history})


# Simulated annealing over legal plans with the exact model: all layers and chains in one vmapped run.
#
# The moves are those of local search; here they start warm and from plans without preference.


@dataclass(frozen=True)
class AnnealSettings:
    """Settings of simulated annealing: length of the chains and their temperatures."""

    chains: int = 8  # of every layer
    steps: int = 6000  # moves of a chain; rounded up to whole segments
    coldness: tuple[float, float] = (1e3, 1e4)  # 1 / temperature, first and last, relative to a layer's time
    batches: int = 64  # that judge a move, drawn anew for every segment
    seed: int = 0
    time_limit_s: float | None = None


def anneal(problem: PlacementProblem, settings: AnnealSettings, progress: Progress = silent) -> TuneResult:
    """Find a plan by simulated annealing. Ctrl-C or the time limit ends the chains where they are."""
    with StopSwitch(settings.time_limit_s) as stop:
        evaluator, history, key = Evaluator(problem, settings.seed, stop, progress), History(), jr.key(settings.seed)
        with evaluator.timed("annealing"):
            shares = jnp.asarray(random_starts(evaluator, settings.chains, settings.seed), jnp.float32)
            kept, least = np.asarray(shares[:, 0], float), np.full(len(shares), np.inf)
            for first in range(0, settings.steps, local_search.SEGMENT):
                # Under a time limit cooling follows the time used.
                cooled = np.clip((first + np.arange(local_search.SEGMENT)) / settings.steps, min(stop.used, 1), 1)
                coldness = jnp.asarray(geometric(*settings.coldness, cooled), jnp.float32)
                batches = evaluator.draw(settings.batches)
                shares, costs = local_search.improve(
                    evaluator.search, shares, batches, coldness, jr.fold_in(key, first)
                )
                found, seconds = best(np.asarray(shares, float), np.asarray(costs, float), 1)
                evaluator.offer(found, seconds)
                improved = seconds[:, 0] < least
                kept, least = np.where(improved[:, None, None], found[:, 0], kept), np.minimum(least, seconds[:, 0])
                history.add(first + local_search.SEGMENT, seconds[:, 0])
                progress("annealing", min(first + local_search.SEGMENT, settings.steps), settings.steps)
                if stop.reason:
                    break
            plans = np.concatenate([np.asarray(shares, float), kept[:, None]], axis=1)
            plans, scores = best(plans, evaluator.score(plans), 1)
        stages = {"annealed": scores[:, 0]}
        with evaluator.timed("rebalance"):
            plans, _ = evaluator.rebalance(plans, scores)
        return evaluator.conclude(plans[:, 0], stages, {"annealing": history})
