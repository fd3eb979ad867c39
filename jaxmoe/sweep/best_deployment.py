"""The deployment of a study that serves most requests a second on each device within limits: a race.

Deployments come in the order of an estimate, one of each layout first. Each is tried at a rate a little above that of
the best one before it. Only if it meets the limits there is its own highest rate looked for, roughly. The best one's is
narrowed at the end, and who led before is tried again where it may still be above. One whose bound is below needs no
trial.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from jaxmoe.config import Scenario
from jaxmoe.config.keys import METHOD
from jaxmoe.errors import InputError
from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving
from jaxmoe.experiment.serving_inputs import ServingReader
from jaxmoe.serving.online.arrivals import mean_rate
from jaxmoe.serving.online.work_bound import rate_bound, rate_estimate
from jaxmoe.sweep.point import Values
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.served import check_serving
from jaxmoe.sweep.study import Study

TOLERANCE = 0.01  # of the highest rate of the best
AHEAD = 0.015  # by which another deployment has to be better to be worth its trials
COARSE = 2 * AHEAD  # of the highest rate of one that leads meanwhile: who leads next is better than half of it
STRIDE = 1.08  # between the first rates that one is tried at which leads
BATCHING = "serving.engine."  # keys of what is no layout
SAME_FOR_ALL = {  # by section of a scenario
    "deployment": ("concurrency", "prompt_tokens", "output_tokens"),
    "serving": ("arrivals", "lengths", "prefixes", "topics", "limits", "seed"),
}


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

    If it was better than all before it, `rate` is the highest that it was seen to meet, requests/s of a device. Else
    its `bound` is not above theirs, or it does not meet the limits there: it is `behind`.
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
    space, reader = Space(study), ServingReader()
    scenarios: list[tuple[Values, Scenario]] = []
    left_out: dict[str, str] = {}
    for point in space.points():
        values = {key: value for key, value in point.values.items() if key not in METHOD}
        with leaving_out(left_out, values):
            scenarios.append((values, space.scenario(values)))
    for section, names in SAME_FOR_ALL.items():
        for name in names:
            asked = [getattr(getattr(scenario, section), name, None) for _, scenario in scenarios]
            if any(each != asked[0] for each in asked):
                said = "varies, but all deployments serve the same requests; move it to set"
                raise SweepError(f"{study.path}: {section}.{name} {said}")
    found: list[tuple[Values, Serving]] = []
    for values, scenario in scenarios:
        with leaving_out(left_out, values):
            found.append((values, reader(scenario)))
    if not found:
        raise SweepError(f"{study.path}: no deployment can be. The first: {next(iter(left_out.values()))}")
    if found[0][1].rate is None:
        raise SweepError(f"{study.path}: requests do not come at a rate; take serving.arrivals that do")
    return found, left_out


@contextmanager
def leaving_out(left_out: dict[str, str], values: Values) -> Iterator[None]:
    """Notes why a deployment cannot be, and goes on with the others."""
    try:
        yield
    except InputError as error:
        left_out[told(values)] = str(error)


def candidate(values: Values, serving: Serving) -> Contender:
    """A candidate with what its table of steps tells; it bounds nothing where experts move and steps change."""
    asked = serving.requests, serving.fleet, serving.table, serving.limits
    bound = rate_bound(*asked) if serving.rebalancing is None else math.inf
    return Contender(values, serving, rate_estimate(*asked), bound)


def race(candidates: Sequence[Contender], check: Callable[[], None] = lambda: None) -> list[Verdict]:
    """What becomes of candidates, in the order in which they are first tried.

    Where a rate that is met is one above all others that are, none is more than `AHEAD` better than the best. `check`
    is called before each trial. Raises `InputError` where there are too few requests to tell.
    """
    order = in_order(candidates)
    trials = {each: RateTrials(each.serving, check=check) for each in order}
    best: Contender | None = None
    while True:
        target = trials[best].best / best.devices * (1 + AHEAD) if best else 0.0
        rivals = (each for each in order if each is not best and _most(each, trials[each]) > target)
        if (rival := next(rivals, None)) is None:
            if best is None or trials[best].above / trials[best].best <= 1 + TOLERANCE:
                return [_verdict(each, trials[each]) for each in order]
            trials[best].narrow(TOLERANCE)
        elif best is None or trials[rival].meets(target * rival.devices):
            _climb(rival, trials[rival], target)
            best = rival if trials[rival].best else best


def in_order(candidates: Sequence[Contender]) -> list[Contender]:
    """The best of each layout by the estimate, then the second of each, and so on.

    Layouts differ more than what one has by batching, and estimates of them are further off.
    """
    place: Counter[str] = Counter()
    ranked: list[tuple[int, Contender]] = []
    for each in sorted(candidates, key=lambda each: -each.estimate / each.devices):
        layout = told({key: value for key, value in each.values.items() if not key.startswith(BATCHING)})
        ranked.append((place[layout], each))
        place[layout] += 1
    return [each for _, each in sorted(ranked, key=lambda each: each[0])]


def _most(each: Contender, trials: RateTrials) -> float:
    """What it may serve at most, requests/s of a device, by its bound and trials; 0 where no rate was met."""
    return 0.0 if trials.count and not trials.best else min(each.bound, trials.above) / each.devices


def _climb(each: Contender, trials: RateTrials, target: float) -> None:
    """Look for the highest rate roughly, from a target that is met if there is one."""
    if math.isinf(trials.highest(target * each.devices or start_of(each), COARSE, STRIDE)):
        raise InputError(
            f"serving.arrivals: all {len(each.serving.requests)} requests at once keep their limits with "
            f"{told(each.values)}, so there is no highest rate; give more requests"
        )


def _verdict(each: Contender, trials: RateTrials) -> Verdict:
    if trials.best:
        return Verdict(each, "led", trials.best / each.devices, trials.simulated)
    return Verdict(each, "behind" if trials.simulated else "bound", None, trials.simulated)


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
