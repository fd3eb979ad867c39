"""Changes of an engine while it serves: from a time on its steps take another table, and the change has its price."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmoe.errors import InputError
from jaxmoe.serving.online.step_table import StepTable


class Change(NamedTuple):
    """Steps of an engine that begin at `at` or later take `table`; the first of them takes `pause` seconds longer.

    The pause is for what the change itself costs, such as weights that move between GPUs while no layer can run. An
    engine that is idle then pays it in its next step, as one that balances experts after a step does. Where several
    changes come before one step, their pauses add up and the last table counts.
    """

    at: float  # s on the clock of arrivals
    table: StepTable
    pause: float = 0.0  # s
    engine: int = 0  # engines of a decode pool are counted after the others


def check_changes(changes: Sequence[Change], engines: int) -> None:
    """Raise `InputError` for changes of engines that are not there, out of order, or of no time."""
    last = -math.inf
    for number, change in enumerate(changes):
        if not 0 <= change.engine < engines:
            raise InputError(f"changes[{number}].engine is {change.engine}; expected 0 to {engines - 1}")
        if not change.at >= last:
            raise InputError(
                f"changes[{number}].at is {change.at:g} s, after one at {last:g} s; expected ascending times, so sort "
                "changes by them"
            )
        if not 0 <= change.pause < math.inf:
            raise InputError(f"changes[{number}].pause is {change.pause:g} s; expected 0 or more, and no end to it")
        last = change.at
