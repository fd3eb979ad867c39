"""What every optimiser hands over."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Progress = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the steps in all."""


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
    """A legal plan, what it takes, and how it came about.

    `stages` holds the objective after each step of the way, s [layer]: `relaxed` (of the relaxed model),
    `rounded`, `rebalanced`, `refined`, `final` (all exact, on the same batches, unseen by the descent).
    `final` is `refined` except in layers that tensor parallelism with a ring serves faster.
    """

    share: np.ndarray  # [layer, expert, node]
    gathered: np.ndarray  # [layer, expert, node]: the best plan that gathers in every layer
    stages: dict[str, np.ndarray]
    bound: np.ndarray  # s [layer]: no placement that gathers does better
    descent: History
    refinement: History
    seed: int
    seconds: dict[str, float]  # wall time of every stage
    stopped: str | None  # why it ended early, or None
