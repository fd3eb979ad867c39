"""The gradient tuner: descend, round, rebalance, improve locally, keep the best; then improve hybrids along rings.

Plans that gather are searched under the exchange that serves them best, over single nodes and over the groups of the
best cuts of the machine. Every step is scored on the same selection batches, which the descent never sees.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.engine.layer import MANY_NODES
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.rounding import keep_hosts
from jaxmoe.placement.strategies import Shipped, groups_of
from jaxmoe.relax import geometric
from jaxmoe.threads import beside, side_by_side
from jaxmoe.tune import descent, local_search
from jaxmoe.tune.descent import typical_part
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.gradient_free import random_starts
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import Groups, History, Plans, Progress, Ranked, Scores, TuneResult, best, better, silent
from jaxmoe.tune.settings import StopSwitch, TunerSettings, affordable

LEAST_PART = 0.1  # of an expert's typical part on a node; less is rounded away
ROUND = 4  # tokens that choose at once in descents and moves; links then carry 1.6 % more (studies/benchmarks)
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


class _Candidates(NamedTuple):
    """Plans that gather, and the groups of nodes over which each was searched."""

    plans: Plans
    group: Groups
    scores: Scores

    def beside(self, others: "_Candidates") -> "_Candidates":
        return _Candidates(*(np.concatenate(each, axis=1) for each in zip(self, others, strict=True)))

    def best(self, count: int) -> "_Candidates":
        """The best of every layer, best first."""
        plans, scores = best(self.plans, self.scores, count)
        order = np.argsort(self.scores, axis=1, kind="stable")[:, :count]
        return _Candidates(plans, np.take_along_axis(self.group, order[..., None], axis=1), scores)


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
            dealt = self.dealt(exchange)
        # Compiling the descent leaves a core to the strategies, which it does not wait for.
        with evaluator.timed("descent"), beside(self.shipped_starts) as shipped:
            group = self.nodes(0 if relaxed is None else relaxed.shape[1])
            # Compiling, which nothing stops, takes about as long as that of the exchanges did.
            able = self.evaluator.stop.has(self.evaluator.seconds["strategies"])
            if relaxed is None and self.settings.restarts and able:
                starts = self.cuts(dealt)
                relaxed, stages["relaxed"], history["descent"] = self.descend(exchange, starts)
                group = starts.group
        with evaluator.timed("rounding"):
            known = shipped.result()
            rounded = known if relaxed is None else np.concatenate([self.round(relaxed, group), known], axis=1)
            group = np.concatenate([group, self.nodes(known.shape[1])], axis=1)
            found = _Candidates(rounded, group, evaluator.score(rounded, exchange)).beside(dealt)
            stages["rounded"] = found.scores.min(axis=1)
            found = found.best(self.settings.refine_chains)
        with evaluator.timed("rebalance"):
            found = self.rebalance(found, exchange)
            stages["rebalanced"] = found.scores.min(axis=1)
        with evaluator.timed("refinement"):
            found, history["refinement"] = self.refine(found, exchange)
            found = self.rebalance(found.best(1), exchange)
        with evaluator.timed("hybrids"):
            hybrids = self.hybrids()
        return evaluator.conclude(found.plans[:, 0], stages, history, hybrids)

    def gathering(self) -> AbstractExchange:
        """The exchange for plans that gather: the best for plans without preference."""
        gathers = self.problem.gathers
        start, look = random_starts(self.evaluator, 1, self.settings.seed), self.evaluator.look
        scores = side_by_side(lambda each: self.evaluator.score(start, each, look).mean(), gathers.values())
        seconds: dict[str, float] = {}
        self.evaluator.progress("exchanges", 0, len(gathers))
        for name, score in zip(gathers, scores, strict=True):
            seconds[name] = float(score)
            self.evaluator.progress("exchanges", len(seconds), len(gathers))
        return gathers[min(seconds, key=seconds.__getitem__)]

    def stand_in(self, exchange: AbstractExchange) -> AbstractExchange:
        """The exchange of descents and moves: with many nodes tokens choose in rounds, which takes less time."""
        return exchange.in_rounds(ROUND) if self.problem.num_nodes > MANY_NODES else exchange

    def nodes(self, candidates: int) -> Groups:
        """Every node a group of its own, for so many plans of every layer."""
        nodes = self.problem.num_nodes
        return np.broadcast_to(np.arange(nodes), (len(self.problem.frequency), candidates, nodes))

    def group(self, hybrid: Shipped) -> Int[np.ndarray, " node"]:
        """The group of every node of a complete hybrid."""
        assert hybrid.rings is not None
        return groups_of(hybrid.rings, self.problem.model.machine.topology)

    def dealt(self, exchange: AbstractExchange) -> _Candidates:
        """Whole experts dealt by load to the groups of the `descent_cuts` best cuts of every layer, best first.

        A look at some batches tells which cuts these are.
        """
        problem, hybrids = self.problem, self.evaluator.hybrids if self.settings.descent_cuts else []
        (layers, experts), nodes = problem.frequency.shape, problem.num_nodes
        if not hybrids:
            return _Candidates(np.zeros((layers, 0, experts, nodes)), self.nodes(0), np.zeros((layers, 0)))
        plans = np.stack([each.share for each in hybrids], axis=1).astype(float)
        group = np.stack([self.group(each) for each in hybrids])

        def scored(plans: Plans, batches: int | None = None) -> Scores:
            return np.where(self.evaluator.fits(plans), self.evaluator.score(plans, exchange, batches), np.inf)

        looks = scored(plans, self.evaluator.look)
        near = _Candidates(plans, np.broadcast_to(group, (layers, *group.shape)), looks).best(
            self.settings.descent_cuts
        )
        return near._replace(scores=scored(near.plans)).best(self.settings.descent_cuts)

    def cuts(self, dealt: _Candidates) -> _Candidates:
        """Groups of every restart, nodes and the best cuts of the layer in turn, and the plans that starts lean to.

        The first start over a cut leans to no plan, the second to experts dealt by load, and so on in turn.
        """
        single = np.zeros((len(dealt.plans), 1, *dealt.plans.shape[2:]))
        options = _Candidates(single, self.nodes(1), single[..., 0, 0]).beside(dealt)
        turn, option = np.divmod(np.arange(self.settings.restarts), options.group.shape[1])
        lean = options.plans[:, option] * (turn % 2)[:, None, None]
        return _Candidates(lean, options.group[:, option], options.scores[:, option])

    def shipped_starts(self) -> Plans:
        """The best strategy of every layer as a plan to improve."""
        shipped = self.evaluator.shipped
        empty = np.zeros((len(self.problem.frequency), 0, *self.problem.frequency.shape[1:], self.problem.num_nodes))
        return empty if shipped is None else shipped.plan[:, None]

    def descend(
        self, exchange: AbstractExchange, starts: _Candidates
    ) -> tuple[Plans, Float[np.ndarray, " layer"], History]:
        """Relaxed plans of all restarts, the best relaxed time, and its history."""
        settings, history = self.settings, History()
        ends = {
            "temperature": settings.sinkhorn_temperature,
            "width": settings.support_width,
            "max_temperature": settings.max_temperature,
        }
        problem = self.problem.under(self.stand_in(exchange))
        land = descent.landscape(problem, settings.budget_spread, settings.learning_rate)
        state = descent.start_in_groups(problem, starts.group, starts.plans, settings.seed)
        self.evaluator.progress("descent", 0, settings.steps)  # the first segment compiles
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

    def round(self, relaxed: Plans, group: Groups) -> Plans:
        """Keep the hosts that count, and divide each expert over them as descent did."""
        groups = group.max(axis=2, keepdims=True) + 1
        part = typical_part(self.problem.frequency[:, None], groups) * groups / relaxed.shape[3]
        return self.evaluator.legal(keep_hosts(relaxed, LEAST_PART * part))

    def rebalance(self, found: _Candidates, exchange: AbstractExchange) -> _Candidates:
        """Experts divided over their hosts anew."""
        plans, scores = self.evaluator.rebalance(found.plans, found.scores, exchange, found.group)
        return _Candidates(plans, found.group, scores)

    def refine(self, found: _Candidates, exchange: AbstractExchange) -> tuple[_Candidates, History]:
        """Chains of exact moves from every plan; each ends with the better of its first and its last plan.

        All moves see the same batches: with others for every segment, a chain would follow their differences.
        """
        steps, history, key = self.settings.refine_steps, History(), jr.key(self.settings.seed)
        stand_in = self.stand_in(exchange)
        batches = self.evaluator.draw(self.settings.refine_batches, exchange)
        shares, group = jnp.asarray(found.plans, jnp.float32), jnp.asarray(found.group)
        self.evaluator.progress("refinement", 0, steps)
        self.evaluator.stop.has(self.evaluator.seconds["strategies"] / 2)
        for first in range(0, steps, local_search.SEGMENT):
            if self.evaluator.stop.reason:
                break
            progress = np.minimum((first + np.arange(local_search.SEGMENT)) / steps, 1)
            cold = jnp.asarray(geometric(*REFINE_COLDNESS, progress), jnp.float32)
            luck = jr.fold_in(key, first)
            shares, costs = local_search.improve(self.evaluator.search, shares, batches, cold, luck, stand_in, group)
            history.add(first + local_search.SEGMENT, np.asarray(costs.min(axis=1)))
            self.evaluator.offer(np.asarray(shares, float), np.asarray(costs, float), exchange)
            self.evaluator.progress("refinement", min(first + local_search.SEGMENT, steps), steps)
        ended = np.asarray(shares, float)
        scores = np.where(self.evaluator.fits(ended), self.evaluator.score(ended, exchange), np.inf)
        plans, scores = better(found.plans, found.scores, ended, scores)
        return _Candidates(plans, found.group, scores), history

    def hybrids(self) -> list[Ranked]:
        """The best complete hybrids, if rings serve them best, with the experts of each group improved by moves."""
        made, topology = [], self.problem.model.machine.topology
        named = {each.name: self.evaluator.looks[each.name] for each in self.evaluator.hybrids}
        fastest = sorted(named, key=lambda name: named[name].seconds.mean())[: self.settings.hybrid_cuts]
        for shipped in self.evaluator.hybrids:
            if shipped.name not in fastest or self.evaluator.stop.reason:
                continue
            (exchange, _), *_ = Counter(named[shipped.name].exchange.tolist()).most_common(1)
            if exchange in self.problem.gathers:
                continue  # the search over groups has it
            ring, group = build_exchange(exchange, topology), self.group(shipped)
            chains = self.settings.refine_chains
            plans = np.repeat(named[shipped.name].plan[:, None], chains, axis=1)
            start = _Candidates(
                plans, np.broadcast_to(group, (*plans.shape[:2], len(group))), self.evaluator.score(plans, ring)
            )
            found, _ = self.refine(start, ring)
            best = self.rebalance(found.best(1), ring)
            made.append(self.evaluator.under_best(best.plans[:, 0], {exchange: ring}))
        return made
