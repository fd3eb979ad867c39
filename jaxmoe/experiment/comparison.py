"""Strategies side by side: judged on all evaluation batches, replayed on the first of them."""

from dataclasses import dataclass

import numpy as np

from jaxmoe.experiment.clock import Report, StageClock
from jaxmoe.experiment.evaluation import Replay, Score, replay, score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import TUNED, Strategy
from jaxmoe.experiment.tuning import placement_problem
from jaxmoe.network import FewestHops, LowestHost
from jaxmoe.placement import PlanError
from jaxmoe.tune.bounds import lower_bound

OTHER_GATHER = {"lowest_host": ("fewest_hops", FewestHops()), "fewest_hops": ("lowest_host", LowestHost())}


@dataclass(frozen=True)
class Comparison:
    """By name of the strategy."""

    strategies: dict[str, Strategy]
    scores: dict[str, Score]
    other_gather: dict[str, Score]  # with the second gather rule
    replays: dict[str, Replay]
    bound: np.ndarray | None  # s [layer]: no sharded plan that gathers does better on these batches

    def replayed(self, name: str) -> Score:
        """The score of a strategy on the replayed batches alone."""
        return self.scores[name].first_batches(self.replays[name].total.shape[1])

    def speedup(self, name: str, plan: str = TUNED) -> np.ndarray:
        """Time of a strategy over that of `plan`, [layer]."""
        return self.scores[name].layer_total / self.scores[plan].layer_total


def compare(inputs: Inputs, strategies: list[Strategy], clock: StageClock, report: Report) -> Comparison:
    """Judge and replay every strategy."""
    other = OTHER_GATHER[inputs.scenario.costs.gather][1]
    scores, other_gather = {}, {}
    with clock.stage("evaluate"):
        for done, strategy in enumerate(strategies, start=1):
            scores[strategy.name] = score(inputs, strategy, inputs.evaluation_batches)
            other_gather[strategy.name] = score(inputs, strategy, inputs.evaluation_batches, other)
            report("evaluate strategies", done, len(strategies))
    with clock.stage("bound"):
        bound = _bound(inputs)
    with clock.stage("simulate"):
        replays = {s.name: _replay(inputs, s, report) for s in strategies}
    return Comparison(
        strategies={strategy.name: strategy for strategy in strategies},
        scores=scores,
        other_gather=other_gather,
        replays=replays,
        bound=bound,
    )


def _bound(inputs: Inputs) -> np.ndarray | None:
    """The bound on what any placement does on the evaluation batches, `None` where no placement fits."""
    try:
        problem = placement_problem(inputs)
    except PlanError:
        return None
    return lower_bound(problem, inputs.evaluation_batches)


def _replay(inputs: Inputs, strategy: Strategy, report: Report) -> Replay:
    stage = f"simulate {strategy.name}"
    return replay(inputs, strategy, inputs.validation_batches, lambda done, total: report(stage, done, total))
