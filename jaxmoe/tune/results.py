"""Plans with the exchange that serves each layer best and the time that takes, and the results of all optimisers."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxmoe.tune.objective import Objective

if TYPE_CHECKING:
    from jaxmoe.tune.problem import PlacementProblem

Plan = Float[np.ndarray, "layer expert node"]
Plans = Float[np.ndarray, "layer candidate expert node"]
Scores = Float[np.ndarray, "layer candidate"]
Groups = Int[np.ndarray, "layer candidate node"]  # the group of every node, from 0

STANDARD_ERRORS = 2  # of a gain that counts
GROUPS = 8  # of batches, from whose gains the standard error is estimated


class Ranked(NamedTuple):
    """A plan, its objective, s, the name of its exchange, and the times of the batches, layer by layer."""

    plan: Plan
    seconds: Float[np.ndarray, " layer"]
    exchange: Shaped[np.ndarray, " layer"]  # str
    batches: Float[np.ndarray, "layer batch"]  # s


def least(ranked: Iterable[Ranked]) -> Ranked:
    """The fastest of several in every layer; among equals the first."""
    given = list(ranked)
    chosen = np.stack([each.seconds for each in given]).argmin(axis=0)
    row = np.arange(len(chosen))
    return Ranked(*(np.stack(parts)[chosen, row] for parts in zip(*given, strict=True)))


def where_surely_faster(plan: Ranked, known: Ranked, aim: Objective) -> Ranked:
    """Returns the plan, with an infinite time in layers where its gain over a known plan may be chance.

    The gain is the mean over groups of batches, and has to be at least twice its standard error.
    """

    def grouped(seconds: Float[np.ndarray, "layer batch"]) -> Float[np.ndarray, "layer group"]:
        count = seconds.shape[1] // GROUPS * GROUPS
        return aim.of(seconds[:, :count].reshape(len(seconds), GROUPS, -1))

    gains = grouped(known.batches) - grouped(plan.batches)
    sure = gains.mean(axis=1) > STANDARD_ERRORS * gains.std(axis=1, ddof=1) / np.sqrt(GROUPS)
    return plan._replace(seconds=np.where(sure, plan.seconds, np.inf))


def better(plans: Plans, scores: Scores, others: Plans, other_scores: Scores) -> tuple[Plans, Scores]:
    """The better of two plans, candidate by candidate."""
    less = other_scores < scores
    return np.where(less[..., None, None], others, plans), np.where(less, other_scores, scores)


def best(
    plans: Plans, scores: Scores, count: int
) -> tuple[Float[np.ndarray, "layer best expert node"], Float[np.ndarray, "layer best"]]:
    """The best candidates of every layer, best first."""
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(plans, order[..., None, None], axis=1), np.take_along_axis(scores, order, axis=1)


# The best plan of a search that may be ended before its work is.


class PlanSoFar(NamedTuple):
    """A legal plan of a problem, its objective, s, and the name of the exchange of every layer."""

    problem: "PlacementProblem"
    plan: Plan
    seconds: Float[np.ndarray, " layer"]
    exchange: Shaped[np.ndarray, " layer"]  # str


@dataclass
class BestSoFar:
    """The best legal plan that a search has found up to now; any thread may offer one or read it."""

    found: PlanSoFar | None = None
    _offering: Lock = field(default_factory=Lock)

    def offer(self, new: PlanSoFar) -> None:
        """Take over layers in which the plan is faster, or all of a plan of another problem that is faster."""
        with self._offering:
            known = self.found
            if known is None or known.problem is not new.problem:
                if known is None or new.seconds.mean() < known.seconds.mean():
                    self.found = new
                return
            less = new.seconds < known.seconds
            plan = np.where(less[:, None, None], new.plan, known.plan)
            seconds, exchange = np.minimum(new.seconds, known.seconds), np.where(less, new.exchange, known.exchange)
            self.found = PlanSoFar(new.problem, plan, seconds, exchange)


best_so_far: ContextVar[BestSoFar | None] = ContextVar("best_so_far", default=None)
"""Where searches that begin from here on keep what they find; by default nowhere."""


# The progress callback and the result of every optimiser.

Progress = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the steps in all."""


def silent(stage: str, done: int, of: int) -> None:
    """Report progress to nobody."""


@dataclass
class History:
    """Objective by step, s: the best of all candidates of every layer."""

    step: list[int] = field(default_factory=list)
    seconds: list[np.ndarray] = field(default_factory=list)  # [layer]

    def add(self, step: int, seconds: np.ndarray) -> None:
        self.step.append(step)
        self.seconds.append(np.asarray(seconds))


@dataclass(frozen=True)
class TuneResult:
    """Result of every optimiser: a legal plan, the exchange of every layer, its time, and the course of the search.

    `stages` holds the objective after each step of the way, s [layer], all on the same batches, unseen by the
    search. The last two are `searched`, of the plan that the search ended with, and `final`, of what is returned: in
    layers where no search was faster by more than the choice of batches explains, the best shipped strategy. Both are
    under the best exchange, those before are an optimiser's own. All are exact but `relaxed`, of the relaxed model.
    """

    share: np.ndarray  # [layer, expert, node]
    exchange: tuple[str, ...]  # by layer
    gathered: np.ndarray  # [layer, expert, node]: what the search itself ended with, a plan that gathers
    gathered_exchange: tuple[str, ...]  # the best for it
    stages: dict[str, np.ndarray]
    bound: np.ndarray  # s [layer]: nothing that may be returned does better
    history: dict[str, History]  # of every stage that has steps
    seed: int
    seconds: dict[str, float]  # wall time of every stage
    stopped: str | None  # why it ended early, or None
    shipped: Ranked | None = None  # the best shipped strategy of every layer, if any fits

    @property
    def cost(self) -> np.ndarray:
        """Exact objective of the plan, s [layer]."""
        return self.stages["final"]

    @property
    def wall_s(self) -> float:
        """Wall time of all stages, s."""
        return sum(self.seconds.values())
