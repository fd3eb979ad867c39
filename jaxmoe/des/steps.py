"""Replay of a whole step, launch by launch: what kernels and exchanges are, how long each takes alone, and what waits.

An independent witness of the engine's schedules: it knows launches and queues, and no formula of a step. A GPU has a
queue of kernels, and the network one of exchanges. Each serves its launches in their order: the first that has not
begun begins when all that it waits for has ended. While an exchange holds processors, kernels run on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

Queue = Literal["nodes", "network"]


@dataclass(frozen=True)
class StepLaunch:
    """One launch of a step. `after` are the numbers of earlier launches that it waits for.

    `seconds` are those of the launch alone, on all processors of a GPU; an exchange holds a part of these, `held`.
    """

    name: str
    queue: Queue
    seconds: float
    after: tuple[int, ...] = ()
    held: float = 0.0


@dataclass(frozen=True)
class StepReplay:
    """When each launch began and ended, s; the step takes until the last has ended."""

    begin: Float[np.ndarray, " launch"]
    end: Float[np.ndarray, " launch"]

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))


def replay_step(launches: Sequence[StepLaunch]) -> StepReplay:
    """Run launches in the order in which they are given to their queues.

    Raises `ValueError` where they wait for each other in a circle, which queues make of an order that cannot be.
    """
    waiting = {queue: [at for at, each in enumerate(launches) if each.queue == queue] for queue in ("nodes", "network")}
    begin, end = np.full((2, len(launches)), np.nan)
    left = np.array([each.seconds for each in launches])
    now = 0.0
    while any(waiting.values()):
        running = {
            queue: line[0]
            for queue, line in waiting.items()
            if line and not np.isnan(end[[*launches[line[0]].after]]).any()
        }
        if not running:
            names = ", ".join(launches[line[0]].name for line in waiting.values() if line)
            raise ValueError(f"{names} wait for launches behind them; give launches in an order that can be")
        for at in running.values():
            begin[at] = now if np.isnan(begin[at]) else begin[at]
        held = launches[running["network"]].held if "network" in running else 0.0
        rate = {"nodes": 1 - held, "network": 1.0}
        due = {queue: left[at] / rate[queue] if rate[queue] > 0 else np.inf for queue, at in running.items()}
        passed = min(due.values())
        now += passed
        for queue, at in running.items():
            left[at] -= passed * rate[queue]
            if due[queue] == passed:
                end[at] = now
                waiting[queue].pop(0)
    return StepReplay(begin, end)
