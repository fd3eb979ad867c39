"""Whether engines meet limits at rates, by as few simulated requests as that takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.capacity import between, drained_rate, highest_rate
from jaxmoe.serving.online.metrics import Limits, waits_of
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served

FILLS = 10  # so many times what an answer takes requests have to come


@dataclass(eq=False)
class RateTrials:
    """Trials of a serving at rates, each at most once; `simulated` counts the requests that came in them.

    A trial that `ends_early` does so as soon as too many requests are over their limits, and answers what a whole one
    does. `check` is called before each.
    """

    serving: Serving
    ends_early: bool = True
    check: Callable[[], None] = lambda: None
    simulated: int = 0
    _known: dict[float, bool] = field(default_factory=dict)

    def meets(self, rate: float) -> bool:
        """Whether the requests drain at a rate, 1/s, and the part of them that is asked keeps its limits."""
        if rate not in self._known:
            self.check()
            self._known[rate] = self._meets(rate)
        return self._known[rate]

    def highest(self, start: float, tolerance: float, stride: float = 2.0) -> float:
        """The highest rate that meets the limits, 1/s, as `highest_rate` finds it from `start`."""
        return highest_rate(self.meets, start, tolerance, stride=stride)

    @property
    def count(self) -> int:
        """How many rates were tried."""
        return len(self._known)

    @property
    def best(self) -> float:
        """The highest rate of all trials that meets the limits, 1/s; 0 where none does."""
        return max((rate for rate, met in self._known.items() if met), default=0.0)

    @property
    def above(self) -> float:
        """The lowest rate over that one which does not meet them, 1/s; infinite before there is one."""
        return min((rate for rate, met in self._known.items() if not met and rate > self.best), default=math.inf)

    def narrow(self, tolerance: float) -> None:
        """Try rates between these two until they are within `tolerance`."""
        between(self.meets, self.best, self.above, tolerance)

    def _meets(self, rate: float) -> bool:
        requests, served = self.serving.at(rate, goes_on=self._may_meet if self.ends_early else None)
        self.simulated += int((served.sent >= 0).sum())
        return bool((served.finish >= 0).all()) and self._may_meet(requests, served) and drained_rate(served) is None

    def _may_meet(self, requests: Requests, served: Served) -> bool:
        count, limits = len(requests), self.serving.limits
        return (count - over_limits(requests, served, limits)) / count >= limits.part


def hardly_fills(serving: Serving, rate: float) -> str | None:
    """A note where the requests of a serving all come, at such a rate, before its engines are as full as they get."""
    requests, served = serving.at(rate)
    answer, come = float(np.median(waits_of(requests, served).end_to_end)), len(requests) / rate
    if come >= FILLS * answer:
        return None
    enough = math.ceil(FILLS * answer * rate / 1000) * 1000
    return (
        f"the highest rate is that of {len(requests):,} requests, which come within {come:,.1f} s, while an answer "
        f"takes {answer:,.1f} s: engines hardly fill, and a longer run may keep the limits only at lower rates. "
        f"Take {enough:,} requests or more, by serving.arrivals.requests where they are drawn"
    )


def over_limits(requests: Requests, served: Served, limits: Limits) -> int:
    """Requests that are over a limit already, of which some may not be done yet."""
    now = max(float(each.max()) for each in (served.sent, served.first_token, served.finish))
    come, begun, done = (each >= 0 for each in (served.sent, served.first_token, served.finish))
    first = np.where(begun, served.first_token, now) - served.sent
    further = np.where(done, served.finish, now) - served.first_token
    slow = (further / np.maximum(requests.output - 1, 1) > limits.per_token) & (requests.output > 1)
    return int((come & (first > limits.first_token) | begun & slow).sum())
