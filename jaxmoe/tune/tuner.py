"""The gradient tuner: descend, round, rebalance, improve locally, keep the best; then the same for complete hybrids.

Plans that gather are searched under the exchange that serves them best. Every step is scored on the same selection
batches, which the descent never sees.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.rounding import keep_hosts
from jaxmoe.placement.strategies import groups_of
from jaxmoe.relax import geometric
from jaxmoe.threads import beside, side_by_side
from jaxmoe.tune import descent, local_search
from jaxmoe.tune.descent import typical_part
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.gradient_free import random_starts
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import History, Plan, Plans, Progress, Ranked, Scores, TuneResult, best, better, silent
from jaxmoe.tune.settings import StopSwitch, TunerSettings, affordable

LEAST_PART = 0.1  # of an expert's typical part on a node; less is rounded away
REFINE_COLDNESS = (3e3, 3e5)  # 1 / temperature of local improvement, first and last, relative to a layer's time


def tune(
    problem: PlacementProblem,
    settings: TunerSettings,
    progress: Progress = silent,
    relaxed: Plans | None = None,
    exchange: str | None = None,
) -> TuneResult:
    """Find a good legal placement of every layer, and the exchange to run it under.

    `relaxed` are plans that another descent ended with, in place of one here: they are rounded and improved under the
    `exchange` of this name, by default the fastest of plans without preference.
    Ctrl-C or the time limit ends the stage under way; what follows is cut to rounding and scoring, and the
    result says why it stopped. The same problem and settings give the same plan, unless stopped.
    """
    with StopSwitch(settings.time_limit_s) as stop:
        evaluator = Evaluator(problem, settings.seed, stop, progress)
        return _Run(evaluator, affordable(settings, problem)).result(relaxed, exchange)


class _Hybrid(NamedTuple):
    """Groups of a machine, and whole experts dealt to them: a plan over groups [layer, expert, place]."""

    name: str  # of the exchange
    group: np.ndarray  # [node]
    exchange: AbstractExchange
    plan: Plan


@dataclass
class _Run:
    """One run of the tuner."""

    evaluator: Evaluator
    settings: TunerSettings

    @property
    def problem(self) -> PlacementProblem:
        return self.evaluator.problem

    def result(self, relaxed: Plans | None, named: str | None) -> TuneResult:
        evaluator, stages, history = self.evaluator, {}, {}
        with evaluator.timed("strategies"):
            exchange = self.gathering() if named is None else self.problem.gathers[named]
        # Compiling the descent leaves a core to the strategies, which it does not wait for.
        with evaluator.timed("descent"), beside(self.shipped_starts) as shipped:
            if relaxed is None:
                relaxed, stages["relaxed"], history["descent"] = self.descend(exchange)
        with evaluator.timed("rounding"):
            plans = np.concatenate([self.round(relaxed), shipped.result()], axis=1)
            scores = evaluator.score(plans, exchange)
            stages["rounded"] = scores.min(axis=1)
            plans, scores = best(plans, scores, self.settings.refine_chains)
        with evaluator.timed("rebalance"):
            plans, scores = evaluator.rebalance(plans, scores, exchange)
            stages["rebalanced"] = scores.min(axis=1)
        with evaluator.timed("refinement"):
            plans, scores, history["refinement"] = self.refine(evaluator.search, plans, scores, exchange)
            plans, scores = evaluator.rebalance(*best(plans, scores, 1), exchange)
        with evaluator.timed("hybrids"):
            hybrids = self.hybrids()
        return evaluator.conclude(plans[:, 0], stages, history, hybrids)

    def gathering(self) -> AbstractExchange:
        """The exchange for plans that gather: the best for plans without preference."""
        gathers = self.problem.gathers
        start = random_starts(self.evaluator, 1, self.settings.seed)
        scores = side_by_side(lambda each: self.evaluator.score(start, each).mean(), gathers.values())
        seconds = dict(zip(gathers, scores, strict=True))
        return gathers[min(seconds, key=seconds.__getitem__)]

    def shipped_starts(self) -> Plans:
        """The best strategy of every layer as a plan to improve."""
        shipped = self.evaluator.shipped
        empty = np.zeros((len(self.problem.frequency), 0, *self.problem.frequency.shape[1:], self.problem.num_nodes))
        return empty if shipped is None else shipped.plan[:, None]

    def descend(self, exchange: AbstractExchange) -> tuple[Plans, Float[np.ndarray, " layer"], History]:
        """Relaxed plans of all restarts, the best relaxed time, and its history."""
        settings, history = self.settings, History()
        ends = {
            "temperature": settings.sinkhorn_temperature,
            "width": settings.support_width,
            "max_temperature": settings.max_temperature,
        }
        problem = self.problem.at_home.under(exchange)
        land = descent.landscape(problem, settings.budget_spread, settings.learning_rate)
        state = descent.start(problem, settings.restarts, settings.seed)
        for first in range(0, settings.steps, descent.SEGMENT):
            batches = descent.segment_batches(
                problem, settings.batches_per_step, next(self.evaluator.seeds), settings.descent_tokens
            )
            schedule = descent.schedule(first, settings.steps, ends)
            state, seconds = descent.descend(land, state, batches, schedule)
            # Few batches are noisy: the mean over a segment is not.
            history.add(first + descent.SEGMENT, np.asarray(seconds.mean(axis=0).min(axis=1)))
            self.evaluator.progress("descent", min(first + descent.SEGMENT, settings.steps), settings.steps)
            if self.evaluator.stop.reason:
                break
        shares = descent.relaxed_shares(land, state.plans, schedule.temperature[-1])
        return np.asarray(shares, float), history.seconds[-1], history

    def round(self, relaxed: Plans) -> Plans:
        """Keep the hosts that count, and divide each expert over them as descent did."""
        least = LEAST_PART * typical_part(self.problem.frequency, relaxed.shape[-1])
        return self.evaluator.legal(keep_hosts(relaxed, np.broadcast_to(least[:, None], relaxed.shape[:-1])))

    def refine(
        self,
        search: local_search.Search,
        plans: Plans,
        scores: Scores,
        exchange: AbstractExchange,
        group: np.ndarray | None = None,
    ) -> tuple[Plans, Scores, History]:
        """Chains of exact moves from every plan; each ends with the better of its first and its last plan.

        All moves see the same batches: with others for every segment, a chain would follow their differences.
        """
        steps, history, key = self.settings.refine_steps, History(), jr.key(self.settings.seed)
        shares, batches = jnp.asarray(plans, jnp.float32), self.evaluator.draw(self.settings.refine_batches, exchange)
        for first in range(0, steps, local_search.SEGMENT):
            if self.evaluator.stop.reason:
                break
            progress = np.minimum((first + np.arange(local_search.SEGMENT)) / steps, 1)
            coldness = jnp.asarray(geometric(*REFINE_COLDNESS, progress), jnp.float32)
            shares, costs = local_search.improve(search, shares, batches, coldness, jr.fold_in(key, first), exchange)
            history.add(first + local_search.SEGMENT, np.asarray(costs.min(axis=1)))
            self.evaluator.progress("refinement", min(first + local_search.SEGMENT, steps), steps)
        ended = np.asarray(shares, float)
        evaluator = self.evaluator
        scored = evaluator.score(ended, exchange) if group is None else evaluator.score_groups(ended, group, exchange)
        return *better(plans, scores, ended, scored), history

    def hybrids(self) -> list[Ranked]:
        """The best cuts of the machine, with the experts that each group holds improved by exact moves."""
        made = []
        for hybrid in self.best_cuts():
            if self.evaluator.stop.reason:
                break
            search = local_search.search_of(self.problem, hybrid.group)
            plans = np.repeat(hybrid.plan[:, None], self.settings.refine_chains, axis=1)
            scores = self.evaluator.score_groups(plans, hybrid.group, hybrid.exchange)
            plans, scores, _ = self.refine(search, plans, scores, hybrid.exchange, hybrid.group)
            plans, _ = self.evaluator.rebalance(*best(plans, scores, 1), hybrid.exchange, hybrid.group)
            spread = plans[:, 0] @ np.asarray(search.spread, float)
            fits = self.evaluator.fits(spread[:, None])[:, 0]
            ranked = self.evaluator.under_best(spread, {hybrid.name: hybrid.exchange})
            made.append(ranked._replace(seconds=np.where(fits, ranked.seconds, np.inf)))
        return made

    def best_cuts(self) -> list[_Hybrid]:
        """The `hybrid_cuts` cuts that are best with experts dealt by load."""
        problem, topology = self.problem, self.problem.model.machine.topology
        if problem.model.mode == "replicated" or not problem.hybrids:
            return []
        cuts = self.evaluator.hybrids
        seen = {name: ranked for name, ranked in self.evaluator.strategies.items() if name in cuts}
        made = []
        for name in sorted(seen, key=lambda name: seen[name].seconds.mean())[: self.settings.hybrid_cuts]:
            group = groups_of(cuts[name], topology)
            exchange, _ = Counter(seen[name].exchange.tolist()).most_common(1)[0]
            plan = _over_groups(seen[name].plan, group)
            made.append(_Hybrid(exchange, group, build_exchange(exchange, topology), plan))
        return made


def _over_groups(plan: Plan, group: np.ndarray) -> Plan:
    """A plan over nodes that groups share evenly as one over places, of which the first are the groups."""
    places = np.zeros(plan.shape)
    places[:, :, : group.max() + 1] = plan @ (group[:, None] == np.arange(group.max() + 1))
    return places
