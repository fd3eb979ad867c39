"""The best of many random plans: what any search has to beat."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxmoe.tune import local_search
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.ranked import best
from jaxmoe.tune.referee import Referee
from jaxmoe.tune.result import History, Progress, TuneResult, silent
from jaxmoe.tune.starts import random_starts
from jaxmoe.tune.stop import StopSwitch

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
