"""The gradient tuner: descend, round, rebalance, improve locally, keep the best; then improve hybrids along rings.

Plans that gather are searched under the exchange that serves them best, over single nodes and over the groups of the
best cuts of the machine. Every step is scored on the same selection batches, which the descent never sees.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.compiling import compile_ahead
from jaxmoe.engine.layer import MANY_NODES
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.rounding import keep_hosts
from jaxmoe.placement.strategies import Shipped, groups_of
from jaxmoe.relax import geometric
from jaxmoe.threads import beside, side_by_side
from jaxmoe.traces import Batch
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


class _Chains(NamedTuple):
    """Chains of moves on some layers."""

    search: local_search.Search
    shares: Float[jax.Array, "layer chain expert node"]
    batches: Batch
    group: Int[jax.Array, "layer chain node"]


def _halves(arrays: Any, axis: int) -> list[Any]:
    """A tree of arrays in halves along an axis, so that two cores work side by side; as one where it is odd."""
    parts = 2 - jax.tree.leaves(arrays)[0].shape[axis] % 2
    # By NumPy: JAX would compile a cut for every shape.
    split = [np.split(np.asarray(leaf), parts, axis) for leaf in jax.tree.leaves(arrays)]
    return [jax.tree.unflatten(jax.tree.structure(arrays), jax.device_put(part)) for part in zip(*split, strict=True)]


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
        # Compiling, which nothing stops, takes about as long as that of the exchanges did.
        able = evaluator.stop.has(evaluator.seconds["strategies"])
        with evaluator.timed("descent"), beside(lambda: self.aside(exchange, able)) as shipped:
            group = self.nodes(0 if relaxed is None else relaxed.shape[1])
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

    def aside(self, exchange: AbstractExchange, able: bool) -> Plans:
        """Work beside the descent, which leaves a core to it while it compiles: moves are compiled where there is time.

        Returns the best strategy of every layer as a plan to improve.
        """
        if able and self.settings.refine_steps:
            (layers, experts), chains = self.problem.frequency.shape, self.settings.refine_chains
            batches = self.problem.draw(self.settings.refine_batches, self.settings.seed)
            plans = np.zeros((layers, chains, experts, self.problem.num_nodes))
            chain = self.chains(plans, self.nodes(chains), self.problem.merged(batches, exchange))[0]
            compile_ahead(local_search.improve, *self.moves(chain, 0, 0, self.stand_in(exchange)))
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
        states = _halves(descent.start_in_groups(problem, starts.group, starts.plans, settings.seed), axis=1)
        self.evaluator.progress("descent", 0, settings.steps)  # the first segment compiles
        for first in range(0, settings.steps, descent.SEGMENT):
            batches = descent.segment_batches(
                problem, settings.batches_per_step, next(self.evaluator.seeds), settings.descent_tokens
            )
            schedule = descent.schedule(first, settings.steps, ends)
            if not first:
                segments = settings.steps // descent.SEGMENT
                segment = descent.compiled(segments, land, states[0], batches, schedule)
            given = [(segment, land, state, batches, schedule) for state in states]
            states, seconds = zip(*side_by_side(lambda call: call[0](*call[1:]), given), strict=True)
            # Few batches are noisy: the mean over a segment is not.
            history.add(first + descent.SEGMENT, np.concatenate(seconds, axis=2).mean(axis=0).min(axis=1))
            self.evaluator.progress("descent", min(first + descent.SEGMENT, settings.steps), settings.steps)
            if self.evaluator.stop.reason:
                break
        plans = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *(state.plans for state in states))
        shares = descent.relaxed_shares(land, plans, schedule.temperature[-1])
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
        steps, history, stand_in = self.settings.refine_steps, History(), self.stand_in(exchange)
        chains = self.chains(found.plans, found.group, self.evaluator.draw(self.settings.refine_batches, exchange))
        self.evaluator.progress("refinement", 0, steps)
        self.evaluator.stop.has(self.evaluator.seconds["strategies"] / 2)
        for first in range(0, steps, local_search.SEGMENT):
            if self.evaluator.stop.reason:
                break
            moves = [self.moves(chain, first, part, stand_in) for part, chain in enumerate(chains)]
            compile_ahead(local_search.improve, *moves[0])
            shares, costs = zip(*side_by_side(lambda given: local_search.improve(*given), moves), strict=True)
            chains = [chain._replace(shares=share) for chain, share in zip(chains, shares, strict=True)]
            history.add(first + local_search.SEGMENT, np.concatenate(costs).min(axis=1))
            self.evaluator.offer(np.concatenate(shares).astype(float), np.concatenate(costs).astype(float), exchange)
            self.evaluator.progress("refinement", min(first + local_search.SEGMENT, steps), steps)
        ended = np.concatenate([chain.shares for chain in chains]).astype(float)
        scores = np.where(self.evaluator.fits(ended), self.evaluator.score(ended, exchange), np.inf)
        plans, scores = better(found.plans, found.scores, ended, scores)
        return _Candidates(plans, found.group, scores), history

    def chains(self, plans: Plans, group: Groups, batches: Batch) -> list[_Chains]:
        """Chains of moves from plans of every layer, in two halves of the layers where these can be halved."""
        search, shares = self.evaluator.search, jnp.asarray(plans, jnp.float32)
        return [
            _Chains(search._replace(frequency=frequency), *rest)
            for frequency, *rest in _halves((search.frequency, shares, batches, jnp.asarray(group)), axis=0)
        ]

    def moves(self, chains: _Chains, first: int, part: int, exchange: AbstractExchange) -> tuple[Any, ...]:
        """Arguments of a segment of moves that begins at the move `first`, of a part of the layers."""
        progress = np.minimum((first + np.arange(local_search.SEGMENT)) / self.settings.refine_steps, 1)
        cold = jnp.asarray(geometric(*REFINE_COLDNESS, progress), jnp.float32)
        key = jr.fold_in(jr.key(self.settings.seed), first + part)
        return chains.search, chains.shares, chains.batches, cold, key, exchange, chains.group

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
