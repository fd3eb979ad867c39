"""The deployment of a study that serves most requests a second on each device within limits: a race.

Deployments come in the order of an estimate. Each is tried at a rate a little above that of the best one before it, and
its own highest rate is looked for only if it meets the limits there. One whose bound is below needs no trial.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxmoe.config.keys import METHOD
from jaxmoe.errors import InputError
from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving
from jaxmoe.experiment.serving_inputs import ServingReader
from jaxmoe.serving.online.arrivals import mean_rate
from jaxmoe.serving.online.work_bound import rate_bound, rate_estimate
from jaxmoe.sweep.deployments import KEYS
from jaxmoe.sweep.points import Space, SweepError, Values
from jaxmoe.sweep.served import check_serving
from jaxmoe.sweep.study import Study

TOLERANCE = 0.01  # of the highest rate
AHEAD = 0.015  # by which another deployment has to be better to be worth its trials
STRIDE = 1.08  # between the first rates that one is tried at which is better
SAME_FOR_ALL = (*KEYS, *(f"serving.{name}" for name in ("arrivals", "lengths", "prefixes", "topics", "limits", "seed")))


@dataclass(frozen=True, eq=False)
class Contender:
    """A deployment and its engines, with an estimate and a bound of its highest rate, 1/s."""

    values: Values
    serving: Serving
    estimate: float
    bound: float

    @property
    def devices(self) -> int:
        """GPUs of all engines."""
        return self.serving.gpus


@dataclass(frozen=True, eq=False)
class Verdict:
    """What became of a candidate, and how many requests were simulated to know.

    Its highest rate, requests/s of a device, is known if it was better than all before it. Else its `bound` is not
    above theirs, or it does not meet the limits there: it is `behind`.
    """

    candidate: Contender
    how: Literal["led", "bound", "behind"]
    rate: float | None = None
    simulated: int = 0


def servings_of(study: Study) -> tuple[list[tuple[Values, Serving]], dict[str, str]]:
    """All deployments of a study that can be, with their engines; of others, by the text of their values, why not.

    Raises `SweepError` where none can be, requests differ between them, or do not come at a rate.
    """
    check_serving(study)
    for key in (*study.config.axes, *study.config.derived):
        if key.startswith(SAME_FOR_ALL):
            raise SweepError(f"{study.path}: {key} varies, but all deployments serve the same requests; move it to set")
    space, reader = Space(study), ServingReader()
    found: list[tuple[Values, Serving]] = []
    left_out: dict[str, str] = {}
    for point in space.points():
        values = {key: value for key, value in point.values.items() if key not in METHOD}
        try:
            found.append((values, reader(space.scenario(values))))
        except InputError as error:
            left_out[told(values)] = str(error)
    if not found:
        raise SweepError(f"{study.path}: no deployment can be. The first: {next(iter(left_out.values()))}")
    serving = found[0][1]
    if serving.fleet.users is not None or not np.isfinite(mean_rate(serving.requests)):
        raise SweepError(f"{study.path}: requests do not come at a rate; take serving.arrivals that do")
    return found, left_out


def candidate(values: Values, serving: Serving) -> Contender:
    """A candidate with what its table of steps tells; it bounds nothing where experts move and steps change."""
    asked = serving.requests, serving.fleet, serving.table, serving.limits
    bound = rate_bound(*asked) if serving.rebalancing is None else math.inf
    return Contender(values, serving, rate_estimate(*asked), bound)


def race(candidates: Sequence[Contender], check: Callable[[], None] = lambda: None) -> list[Verdict]:
    """What becomes of candidates, in the order in which they are tried; the last one that led is best.

    Where a rate that is met is one above all others that are, none is more than `AHEAD` better. `check` is called
    before each. Raises `InputError` where there are too few requests to tell.
    """
    outcomes: list[Verdict] = []
    leader = 0.0
    for each in sorted(candidates, key=lambda each: -each.estimate / each.devices):
        check()
        trials, target = RateTrials(each.serving), leader * (1 + AHEAD) * each.devices
        if leader and each.bound <= target:
            outcomes.append(Verdict(each, "bound"))
        elif leader and not trials.meets(target):
            outcomes.append(Verdict(each, "behind", simulated=trials.simulated))
        else:
            rate = trials.highest(target or start_of(each), TOLERANCE, STRIDE)
            if math.isinf(rate):
                raise InputError(
                    f"serving.arrivals: all {len(each.serving.requests)} requests at once keep their limits with "
                    f"{told(each.values)}, so there is no highest rate; give more requests"
                )
            leader = rate / each.devices
            outcomes.append(Verdict(each, "led", leader, trials.simulated))
    return outcomes


def best_of(study: Study, outcomes: Sequence[Verdict]) -> Verdict:
    """The best of a race. Raises `SweepError` where no deployment meets the limits at any rate."""
    best = max(outcomes, key=lambda each: each.rate or 0.0)
    if not best.rate:
        raise SweepError(
            f"{study.path}: none of {len(outcomes)} deployments meets serving.limits at any rate; relax them"
        )
    return best


def start_of(each: Contender) -> float:
    """A rate to look for the highest from, 1/s."""
    start = min(each.estimate, each.bound)
    return start if 0 < start < math.inf else mean_rate(each.serving.requests)


def told(values: Values) -> str:
    """Values of a candidate as text."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())
