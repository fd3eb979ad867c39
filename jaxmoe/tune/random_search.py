"""Searches without gradients: random plans, and simulated annealing.

The moves are those of local search; here they start warm and from plans without preference.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.relax import geometric
from jaxmoe.tune import local_search
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.referee import Referee
from jaxmoe.tune.result import History, Plans, Progress, TuneResult, best, silent
from jaxmoe.tune.settings import StopSwitch


def random_starts(referee: Referee, candidates: int, seed: int) -> Plans:
    """Plans that fill nodes in random order with experts in random order; the same seed gives the same plans."""
    rng = np.random.default_rng([seed, 2])
    problem = referee.problem
    flops = np.asarray(problem.model.machine.die.flops, float)
    part = flops / flops.sum()

    def plan(frequency: np.ndarray) -> np.ndarray:
        return filled_in_order(frequency, part, rng.permutation(len(frequency)), rng.permutation(len(part)))

    return referee.legal(np.stack([[plan(layer) for _ in range(candidates)] for layer in problem.frequency]))


SEGMENT = 32  # plans of a compiled call; the time limit is checked in between


@dataclass(frozen=True)
class RandomSettings:
    """How many plans are drawn."""

    plans: int = 1024  # of every layer; rounded up to whole segments
    batches: int = 16  # that judge a plan: the same for all
    seed: int = 0
    time_limit_s: float | None = None


def random_search(problem: PlacementProblem, settings: RandomSettings, progress: Progress = silent) -> TuneResult:
    """Draw balanced plans at random and keep the best. Ctrl-C or the time limit ends the drawing."""
    with StopSwitch(settings.time_limit_s) as stop:
        referee, history = Referee(problem, settings.seed, stop, progress), History()
        with referee.timed("random search"):
            batches = referee.draw(settings.batches)
            kept = np.zeros((len(problem.frequency), 0, *problem.frequency.shape[1:], problem.num_nodes))
            scores = np.zeros(kept.shape[:2])
            for first in range(0, settings.plans, SEGMENT):
                drawn = random_starts(referee, SEGMENT, settings.seed + first)
                costs = local_search.score_candidates(referee.search, jnp.asarray(drawn, jnp.float32), batches)
                plans, seconds = np.concatenate([kept, drawn], axis=1), np.concatenate([scores, costs], axis=1)
                kept, scores = best(plans, seconds, 1)
                history.add(first + SEGMENT, scores[:, 0])
                progress("random search", min(first + SEGMENT, settings.plans), settings.plans)
                if stop.reason:
                    break
        return referee.conclude(kept[:, 0], {}, {"random search": history})


@dataclass(frozen=True)
class AnnealSettings:
    """How long the chains are and how they cool."""

    chains: int = 8  # of every layer
    steps: int = 6000  # moves of a chain; rounded up to whole segments
    coldness: tuple[float, float] = (1e3, 1e4)  # 1 / temperature, first and last, relative to a layer's time
    batches: int = 64  # that judge a move, drawn anew for every segment
    seed: int = 0
    time_limit_s: float | None = None


def anneal(problem: PlacementProblem, settings: AnnealSettings, progress: Progress = silent) -> TuneResult:
    """Find a plan by simulated annealing. Ctrl-C or the time limit ends the chains where they are."""
    with StopSwitch(settings.time_limit_s) as stop:
        referee, history, key = Referee(problem, settings.seed, stop, progress), History(), jr.key(settings.seed)
        with referee.timed("annealing"):
            shares = jnp.asarray(random_starts(referee, settings.chains, settings.seed), jnp.float32)
            kept, least = np.asarray(shares[:, 0], float), np.full(len(shares), np.inf)
            for first in range(0, settings.steps, local_search.SEGMENT):
                # Under a time limit cooling follows the time used.
                cooled = np.clip((first + np.arange(local_search.SEGMENT)) / settings.steps, min(stop.used, 1), 1)
                coldness = jnp.asarray(geometric(*settings.coldness, cooled), jnp.float32)
                batches = referee.draw(settings.batches)
                shares, costs = local_search.improve(referee.search, shares, batches, coldness, jr.fold_in(key, first))
                found, seconds = best(np.asarray(shares, float), np.asarray(costs, float), 1)
                improved = seconds[:, 0] < least
                kept, least = np.where(improved[:, None, None], found[:, 0], kept), np.minimum(least, seconds[:, 0])
                history.add(first + local_search.SEGMENT, seconds[:, 0])
                progress("annealing", min(first + local_search.SEGMENT, settings.steps), settings.steps)
                if stop.reason:
                    break
            plans = np.concatenate([np.asarray(shares, float), kept[:, None]], axis=1)
            plans, scores = best(plans, referee.score(plans), 1)
        stages = {"annealed": scores[:, 0]}
        with referee.timed("rebalance"):
            plans, _ = referee.rebalance(plans, scores)
        return referee.conclude(plans[:, 0], stages, {"annealing": history})
