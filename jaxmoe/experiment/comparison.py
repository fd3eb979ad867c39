"""Searched plans and usual strategies, compared under every exchange."""

import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec

import jax
import numpy as np

from jaxmoe.config import build_tuner_settings
from jaxmoe.des import LayerReplay
from jaxmoe.engine import LayerTime
from jaxmoe.experiment.evaluation import Replay, is_simulated, replay, score
from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.experiment.stage_timer import Report, StageTimer
from jaxmoe.experiment.strategies import GATHERED, REGIONS, TUNED, Strategy, strategy
from jaxmoe.experiment.validation import fitted_gamma
from jaxmoe.extras import install_command
from jaxmoe.placement import PlanError
from jaxmoe.registry import OPTIMISERS
from jaxmoe.threads import beside, side_by_side
from jaxmoe.tune import PlacementProblem, TuneResult, TunerSettings
from jaxmoe.tune.bounds import bound_if_any
from jaxmoe.tune.regions import Budgeted, check_copies, within_budget
from jaxmoe.tune.two_stage import TwoStageSettings

# From inputs to a tuned plan: the problem, the optimiser by its name with its settings for one run, the result.

LEAST_S = 1e-3  # of a search that has no time left: it still ends with a plan


def placement_problem(inputs: Inputs) -> PlacementProblem:
    """The search problem of a tuner: layer model, trace or topics, batch size, weights of the objective, exchanges.

    Raises `PlanError` where no placement fits the memory.
    """
    return PlacementProblem(
        model=inputs.model,
        trace=inputs.trace,
        batch_tokens=inputs.scenario.workload.batch_tokens,
        consecutive=inputs.scenario.workload.sampling == "consecutive",
        p95_weight=inputs.scenario.tuning.p95_weight,
        topics=tuple(inputs.topics.values()),
        worst_weight=inputs.scenario.tuning.worst_weight,
        own_exchange=inputs.scenario.costs.exchange,
        exchanges=inputs.scenario.tuning.exchanges,
    )


def check_budget(problem: PlacementProblem, copies: int) -> None:
    """Raise `OptionError` for so many copies of every expert as the machine cannot have, before any work."""
    if copies > 1:
        try:
            check_copies(problem, copies)
        except PlanError as error:
            raise OptionError(f"--copies {copies}: {error}") from None


def check_optimiser(name: str) -> None:
    """Raise `OptionError` for a name that is an unknown optimiser, or an optimiser that lacks a package."""
    if name not in OPTIMISERS:
        raise OptionError(f"--optimiser is {name!r}, expected one of {', '.join(OPTIMISERS)}")
    for package, extra in OPTIMISERS[name].needs.items():
        if find_spec(package) is None:
            install = install_command(extra, package)
            raise OptionError(f"--optimiser {name} needs {package}; install it with: {install}")


def search(
    name: str,
    inputs: Inputs,
    problem: PlacementProblem,
    report: Report,
    copies: int = 1,
    limit_s: float | None = None,
) -> Budgeted:
    """Run the optimiser of this name with up to so many copies of every expert. Returns what it solved, and results.

    The scenario's `tuning` has the seed of all, the time limit unless another is given, and what else the gradient
    tuner takes. Searches with fewer and with more copies share the time limit.
    """
    optimiser, tuning, begun = OPTIMISERS[name], inputs.scenario.tuning, time.monotonic()
    limit_s = tuning.time_limit_s if limit_s is None else limit_s

    def solved(problem: PlacementProblem, to_come: int) -> TuneResult:
        left_s = None if limit_s is None else max(limit_s - (time.monotonic() - begun), LEAST_S) / to_come
        if optimiser.settings is TunerSettings:
            return optimiser.run(problem, replace(build_tuner_settings(tuning), time_limit_s=left_s), report)
        settings = optimiser.settings(seed=tuning.seed, time_limit_s=left_s)
        if isinstance(settings, TwoStageSettings):
            settings = replace(settings, gamma=fitted_gamma(inputs).gamma)
        return optimiser.run(problem, settings, report)

    return within_budget(problem, copies, solved, tuning.seed, report)


def tuned_strategies(inputs: Inputs, result: TuneResult, problem: PlacementProblem) -> list[Strategy]:
    """The tuned plan; before it, where a strategy or hybrid took over layers, the plan that the search ended with.

    First of all, where experts have copies, the best plan of regions as they are: the strategies that it competes with.
    """
    mode = problem.model.mode
    tuned = strategy(inputs, TUNED, problem.placed(result.share), result.exchange, mode)
    regions: list[Strategy] = []
    if problem.regions and result.shipped is not None:
        named = tuple(result.shipped.exchange.tolist())
        regions = [strategy(inputs, REGIONS, problem.placed(result.shipped.plan), named, mode)]
    other = (result.share != result.gathered).any(axis=(1, 2))
    other |= np.array(result.exchange) != np.array(result.gathered_exchange)
    if not other.any():
        return [*regions, tuned]
    note = f"not what the search ended with in {other.sum()} of {len(other)} layers"
    note += ", where a strategy or hybrid is at least as fast"
    return [
        *regions,
        strategy(inputs, GATHERED, problem.placed(result.gathered), result.gathered_exchange, mode),
        replace(tuned, note=tuned.note or note),
    ]


# Strategies side by side: evaluated on all evaluation batches, each under its own exchange and under every other one,
# and replayed on the first of these batches.


@dataclass(frozen=True)
class BestExchange:
    """The fastest exchange of every layer, and under it the mean seconds over batches, [layer], and all times."""

    exchange: tuple[str, ...]
    mean: np.ndarray
    times: tuple[LayerTime, ...]  # of every layer, [batch]


@dataclass(frozen=True)
class Comparison:
    """Times, replays and bound of all strategies, by name of the strategy."""

    strategies: dict[str, Strategy]
    scores: dict[str, LayerTime]  # each under its own exchange
    under: dict[str, dict[str, LayerTime]]  # by exchange; none where not comparable
    replays: dict[str, Replay]
    replayed: dict[str, LayerTime]  # the model on the replayed batches alone, with the simulator's schedule
    bound: np.ndarray | None  # s [layer]: no placement that tuning may return is faster on these batches

    def best(self, name: str) -> BestExchange:
        """Layer by layer: a strategy's own exchange, or, where it is comparable, a faster one that may be chosen."""
        own = self.strategies[name].placement.exchange
        names, times = [*self.under[name]], [self.scores[name], *self.under[name].values()]
        means = np.stack([each.mean for each in times])
        fastest = means.argmin(axis=0).tolist()
        chosen = tuple(names[index - 1] if index else own[row] for row, index in enumerate(fastest))
        rows = tuple(times[index].layer(row) for row, index in enumerate(fastest))
        return BestExchange(chosen, means.min(axis=0), rows)

    @property
    def fastest(self) -> str | None:
        """The comparable strategy that is fastest, each under its best exchange; `None` where none is comparable."""
        able = [name for name, strategy in self.strategies.items() if strategy.comparable]
        return min(able, key=lambda name: self.best(name).mean.mean(), default=None)

    @property
    def reference(self) -> str | None:
        """The strategy that others are compared with: the tuned plan, else the fastest."""
        return TUNED if TUNED in self.strategies else self.fastest

    def speedup(self, name: str, plan: str = TUNED) -> np.ndarray:
        """Time of a strategy over that of `plan`, each under its best exchange, [layer]."""
        return self.best(name).mean / self.best(plan).mean


def time_under_best(comparison: Comparison, name: str) -> LayerTime:
    """Times of a strategy under the best exchange of every layer, [layer, batch]."""
    return _stacked(comparison.best(name).times)


def compare(
    inputs: Inputs,
    strategies: list[Strategy],
    clock: StageTimer,
    report: Report,
    problem: PlacementProblem | None = None,
    begun: Future["Replays"] | None = None,
) -> Comparison:
    """Evaluate and replay every strategy; replays go on while the model is traced and compiled.

    The bound is of the tuner's `problem`, by default that of one copy of every expert. Replays of some strategies may
    have `begun`.
    """

    def replayed_all() -> dict[str, Replay]:
        replays = Replays(inputs, report) if begun is None else begun.result()
        return replays.add(strategies).found

    with beside(replayed_all) as replaying, beside(lambda: _bound(inputs, problem)) as bounding:
        with clock.stage("evaluate"):
            scores, under = _evaluated(inputs, strategies, report)
        with clock.stage("bound"):
            bound = bounding.result()
        with clock.stage("simulate"):
            replays = replaying.result()
            replayed = {s.name: _replayed(inputs, s, scores[s.name]) for s in strategies}
    return Comparison({s.name: s for s in strategies}, scores, under, replays, replayed, bound)


def _evaluated(
    inputs: Inputs, strategies: list[Strategy], report: Report
) -> tuple[dict[str, LayerTime], dict[str, dict[str, LayerTime]]]:
    """Every strategy under its own exchange, and under every other one that may be chosen.

    Exchanges are evaluated in parallel threads, since most of the time is compilation. All strategies share the
    compiled function of an exchange. So do those whose layers run under several: all layers are timed under each.
    """
    batches, wanted = inputs.evaluation_batches, dict[str, list[Strategy]]()
    for each in strategies:
        for exchange in dict.fromkeys((*each.placement.exchange, *(inputs.exchanges if each.comparable else ()))):
            wanted.setdefault(exchange, []).append(each)

    def under(exchange: str) -> dict[str, LayerTime]:
        alike = dict[Hashable, LayerTime]()
        for each in wanted[exchange]:
            if (key := _decided(each, exchange)) not in alike:
                alike[key] = score(inputs, each, batches, exchange)
        return {each.name: alike[_decided(each, exchange)] for each in wanted[exchange]}

    seen: dict[str, dict[str, LayerTime]] = {}
    for exchange, times in zip(wanted, side_by_side(under, wanted), strict=True):
        seen[exchange] = times
        report("evaluate strategies", len(seen), len(wanted))
    scores = {
        each.name: _stacked([seen[name][each.name].layer(row) for row, name in enumerate(each.placement.exchange)])
        for each in strategies
    }
    others = {
        each.name: {name: seen[name][each.name] for name in inputs.exchanges} if each.comparable else {}
        for each in strategies
    }
    return scores, others


def _stacked(rows: Sequence[LayerTime]) -> LayerTime:
    """Times of layers, [batch] each, as [layer, batch]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _decided(strategy: Strategy, exchange: str) -> Hashable:
    """A key that strategies of equal times share under an exchange: several often agree."""
    placement = strategy.placement
    if placement.copies is not None:
        return strategy.name
    return placement.computed.tobytes(), placement.computed_mode, placement.exchanges(exchange)


def _replayed(inputs: Inputs, strategy: Strategy, seen: LayerTime) -> LayerTime:
    if is_simulated(inputs):
        return seen.first_batches(inputs.scenario.validation.batches)
    return score(inputs, strategy, inputs.validation_batches, as_simulated=True)


def _bound(inputs: Inputs, problem: PlacementProblem | None) -> np.ndarray | None:
    """Lower bound on the time of any placement on the evaluation batches, s [layer].

    `None` where no placement fits, or nothing bounds it.
    """
    try:
        problem = placement_problem(inputs) if problem is None else problem
    except PlanError:
        return None
    return bound_if_any(problem, problem.served(inputs.evaluation_batches))


@dataclass(frozen=True)
class Replays:
    """Replays of strategies on the validation batches, by name; layers that they place alike are replayed once."""

    inputs: Inputs
    report: Report
    found: dict[str, Replay] = field(default_factory=dict)
    _layers: dict[Hashable, list[LayerReplay]] = field(default_factory=dict)

    def add(self, strategies: list[Strategy]) -> "Replays":
        """Replay those of the strategies that are not there yet."""
        inputs, report = self.inputs, self.report
        for each in strategies:
            if each.name not in self.found:
                told = partial(report, f"simulate {each.name}")
                self.found[each.name] = replay(inputs, each, inputs.validation_batches, told, self._layers)
        return self


@contextmanager
def replaying_beside(inputs: Inputs, strategies: list[Strategy], report: Report) -> Iterator[Future[Replays]]:
    """Replay strategies while the block searches for others: search and compiling leave cores to it."""
    with beside(lambda: Replays(inputs, report).add(strategies)) as begun:
        yield begun


# Plans judged on every topic that they were tuned over.


def topic_means(inputs: Inputs, comparison: Comparison) -> dict[str, dict[str, float]]:
    """Mean time over layers and unseen batches by comparable strategy and topic, s.

    Every layer runs under the strategy's best exchange, as the comparison has it.
    """
    means: dict[str, dict[str, float]] = {}
    for name, each in comparison.strategies.items():
        if each.comparable:
            best = replace(each, placement=replace(each.placement, exchange=comparison.best(name).exchange))
            times = {topic: score(inputs, best, inputs.topic_batches(topic)).mean for topic in inputs.topics}
            means[name] = {topic: float(mean.mean()) for topic, mean in times.items()}
    return means
