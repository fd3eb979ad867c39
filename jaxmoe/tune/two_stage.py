"""hd_moe's own optimiser: balance the nodes, then map the balanced clusters to the mesh (IV-C).

Layer after layer: node balance spreads the experts over logical clusters by a mixed-integer programme that knows
communication as a linear estimate, and link balance finds which node each cluster is to be. hd_moe maps by Bayesian
optimisation; the other methods have the same task.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.link_balance import METHODS, Budget, Mapping, question_of
from jaxmoe.tune.node_balance import NodeBalance, node_balance
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import History, Progress, TuneResult, silent
from jaxmoe.tune.settings import StopSwitch

NODE_PART = 0.75  # of a layer's time under a time limit of the whole run
USED_PART = 0.9  # of the time left that is given out: a solver cut off by the limit itself would lose its plan
PERCENT = 100  # steps that a stage reports for each layer


@dataclass(frozen=True)
class TwoStageSettings:
    """Settings of node and link balance. Times are for each layer, but the last."""

    gamma: float = 1.0  # simulated communication over the linear estimate, hd_moe Eq. 3; see `fit_gamma`
    node_time_s: float = 45.0
    link_time_s: float = 15.0
    link_method: str = "bayesian"  # a key of `link_balance.METHODS`
    link_batches: int = 64  # that judge a mapping
    seed: int = 0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.link_method not in METHODS:
            raise ValueError(f"link_method is {self.link_method!r}, expected one of {', '.join(METHODS)}")


def two_stage(
    problem: PlacementProblem,
    settings: TwoStageSettings,
    progress: Progress = silent,
    balanced: Sequence[NodeBalance] | None = None,
) -> TuneResult:
    """Find a legal placement of every layer as hd_moe does.

    `balanced` gives the layers' node balances where they are known, as they depend on no seed; then the mapping alone
    is searched. Ctrl-C or the time limit ends the search under way: layers that are left get the even plan in the
    order of the nodes, and the result says why it stopped. How far a search gets in its time is up to the machine.
    """
    if balanced is not None and len(balanced) != len(problem.frequency):
        raise ValueError(f"balanced has {len(balanced)} layers, the problem {len(problem.frequency)}; give every layer")
    with StopSwitch(settings.time_limit_s) as stop:
        return _Run(Evaluator(problem, settings.seed, stop, progress), settings).result(balanced)


@dataclass
class _Run:
    """One run of both stages."""

    evaluator: Evaluator
    settings: TwoStageSettings

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.layers = len(self.evaluator.problem.frequency)
        self.batches = self.evaluator.draw(self.settings.link_batches)

    def result(self, balanced: Sequence[NodeBalance] | None) -> TuneResult:
        nodes, mappings = [], []
        for layer in range(self.layers):
            node_s, link_s = self._times(layer, balanced is not None)
            nodes.append(self.balance(layer, node_s) if balanced is None else balanced[layer])
            mappings.append(self.map(layer, nodes[-1], link_s))
        plan = np.stack([node.share for node in nodes])
        mapped = np.stack([node.share[:, found.order] for node, found in zip(nodes, mappings, strict=True)])
        # Where nodes have room for more or less than each other, a mapping may fill one beyond it.
        legal = self.evaluator.legal(mapped[:, None])
        self.evaluator.offer(legal, np.full(legal.shape[:2], np.inf))
        with self.evaluator.timed("scoring"):
            stages = {"node_balanced": self.evaluator.score(plan[:, None])[:, 0]}
        return self.evaluator.conclude(
            legal[:, 0], stages, {"link balance": together([found.history for found in mappings])}
        )

    def balance(self, layer: int, seconds: float) -> NodeBalance:
        with self.evaluator.timed("node balance"):
            return node_balance(
                self.evaluator.problem,
                layer,
                self.settings.gamma,
                seconds,
                self.evaluator.stop,
                report=self._report("node balance", layer),
            )

    def map(self, layer: int, node: NodeBalance, seconds: float) -> Mapping:
        with self.evaluator.timed("link balance"):
            question = question_of(self.evaluator.problem, node.share, layer, self.batches)
            budget = Budget(seconds, stop=self.evaluator.stop, report=self._report("link balance", layer))
            return METHODS[self.settings.link_method](question, self.settings.seed, budget)

    def _times(self, layer: int, is_balanced: bool) -> tuple[float, float]:
        """Seconds for both stages of a layer: as set, or an even part of what the limit leaves to the rest."""
        limit, settings = self.settings.time_limit_s, self.settings
        if limit is None:
            return settings.node_time_s, settings.link_time_s
        left = max(limit - (time.monotonic() - self.begun), 1e-3) * USED_PART / (self.layers - layer)
        node_part = 0 if is_balanced else NODE_PART
        return min(settings.node_time_s, node_part * left), min(settings.link_time_s, (1 - node_part) * left)

    def _report(self, stage: str, layer: int) -> Callable[[float], None]:
        """Progress of one layer in a stage, of all layers as the caller sees it."""

        def report(part: float) -> None:
            self.evaluator.progress(stage, layer * PERCENT + round(part * PERCENT), self.layers * PERCENT)

        return report


def together(histories: Sequence[History]) -> History:
    """Histories of layers that ran one after the other as one: those that end early keep their last value."""
    longest = max(histories, key=lambda history: len(history.step))
    joint = History()
    for look, step in enumerate(longest.step):
        joint.add(step, np.array([history.seconds[min(look, len(history.step) - 1)] for history in histories]))
    return joint
