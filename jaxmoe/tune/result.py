"""The progress callback and the result of every optimiser."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.tune.ranked import Ranked

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
    """A legal plan, the exchange of every layer, what it takes, and how it came about: the same of every optimiser.

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
