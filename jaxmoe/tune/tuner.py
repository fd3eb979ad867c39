"""The gradient tuner: descend, round, rebalance, improve locally, keep the best.

Every step is scored on the same selection batches, which the descent never sees.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from jaxmoe.placement.rounding import fit_memory, keep_hosts
from jaxmoe.relax import geometric
from jaxmoe.tune import descent, local_search
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.referee import Plans, Referee, Scores, best, better
from jaxmoe.tune.relaxation import typical_part
from jaxmoe.tune.result import History, Progress, TuneResult, silent
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.tune.stop import StopSwitch

LEAST_PART = 0.1  # of an expert's typical part on a node; less is rounded away
REFINE_COLDNESS = (3e2, 1e4)  # 1 / temperature of local improvement, first and last, relative to a layer's time


def tune(problem: PlacementProblem, settings: TunerSettings, progress: Progress = silent) -> TuneResult:
    """Find a good legal placement of every layer.

    Ctrl-C or the time limit ends the stage under way; what follows is cut to rounding and scoring, and the
    result says why it stopped. The same problem and settings give the same plan, unless stopped.
    """
    with StopSwitch(settings.time_limit_s) as stop:
        return _Run(Referee(problem, settings.seed, stop, progress), settings).result()


@dataclass
class _Run:
    """One run of the tuner."""

    referee: Referee
    settings: TunerSettings

    @property
    def problem(self) -> PlacementProblem:
        return self.referee.problem

    def result(self) -> TuneResult:
        referee, stages = self.referee, {}
        with referee.timed("descent"):
            relaxed, stages["relaxed"], descended = self.descend()
        with referee.timed("rounding"):
            plans = self.round(relaxed)
            scores = referee.score(plans)
            stages["rounded"] = scores.min(axis=1)
            plans, scores = best(plans, scores, self.settings.refine_chains)
        with referee.timed("rebalance"):
            plans, scores = referee.rebalance(plans, scores)
            stages["rebalanced"] = scores.min(axis=1)
        with referee.timed("refinement"):
            plans, scores, refined = self.refine(plans, scores)
            plans, scores = referee.rebalance(*best(plans, scores, 1))
        return referee.conclude(plans[:, 0], stages, {"descent": descended, "refinement": refined})

    def descend(self) -> tuple[Plans, Float[np.ndarray, " layer"], History]:
        """Relaxed plans of all restarts, the best relaxed time, and its history."""
        settings, history = self.settings, History()
        ends = {
            "temperature": settings.sinkhorn_temperature,
            "width": settings.support_width,
            "max_temperature": settings.max_temperature,
        }
        land = descent.landscape(self.problem, settings.budget_spread, settings.learning_rate)
        state = descent.start(self.problem, settings.restarts, settings.seed)
        for first in range(0, settings.steps, descent.SEGMENT):
            batches = descent.segment_batches(self.problem, settings.batches_per_step, next(self.referee.seeds))
            schedule = descent.schedule(first, settings.steps, ends)
            state, seconds = descent.descend(land, state, batches, schedule)
            # Few batches are noisy: the mean over a segment is not.
            history.add(first + descent.SEGMENT, np.asarray(seconds.mean(axis=0).min(axis=1)))
            self.referee.progress("descent", min(first + descent.SEGMENT, settings.steps), settings.steps)
            if self.referee.stop.reason:
                break
        shares = descent.relaxed_shares(land, state.plans, schedule.temperature[-1])
        return np.asarray(shares, float), history.seconds[-1], history

    def round(self, relaxed: Plans) -> Plans:
        """Keep the hosts that count, and divide each expert over them as descent did."""
        least = LEAST_PART * typical_part(self.problem.frequency, relaxed.shape[-1])
        plans = keep_hosts(relaxed, np.broadcast_to(least[:, None], relaxed.shape[:-1]))
        for layer, candidate in np.argwhere(~self.referee.fits(plans)):
            plans[layer, candidate] = fit_memory(relaxed[layer, candidate], self.problem.room)
        return plans

    def refine(self, plans: Plans, scores: Scores) -> tuple[Plans, Scores, History]:
        """Chains of exact moves from every plan; each ends with the better of its first and its last plan."""
        steps, history, key = self.settings.refine_steps, History(), jr.key(self.settings.seed)
        shares = jnp.asarray(plans, jnp.float32)
        for first in range(0, steps, local_search.SEGMENT):
            if self.referee.stop.reason:
                break
            progress = np.minimum((first + np.arange(local_search.SEGMENT)) / steps, 1)
            coldness = jnp.asarray(geometric(*REFINE_COLDNESS, progress), jnp.float32)
            batches = self.referee.draw(self.settings.refine_batches)
            shares, costs = local_search.improve(self.referee.search, shares, batches, coldness, jr.fold_in(key, first))
            history.add(first + local_search.SEGMENT, np.asarray(costs.min(axis=1)))
            self.referee.progress("refinement", min(first + local_search.SEGMENT, steps), steps)
        ended = np.asarray(shares, float)
        return *better(plans, scores, ended, self.referee.score(ended)), history
