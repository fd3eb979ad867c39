"""A scenario's requests over time and the engines that serve them; the answers that a run of them gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import numpy as np

from jaxmoe.config.serving import RandomArrivals
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import Row
from jaxmoe.serving.online.arrivals import at_rate, mean_rate
from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.capacity import Forbids, drained_rate, what_forbids
from jaxmoe.serving.online.engine import Fleet
from jaxmoe.serving.online.metrics import PERCENTILES, Limits, Waits, distribution, span_of, waits_of
from jaxmoe.serving.online.rebalancing import Planned, Rebalancing
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable

WAITS = {name: f"{name}_{{}}_s" for name in Waits._fields}  # columns of their statistics
STATISTICS = ("mean", *(f"p{at}" for at in PERCENTILES))
COLUMNS = (
    *("requests", "gpus", "span_s", "sent_per_s", "requests_per_s", "output_tokens_per_s", "goodput_per_s"),
    *("within_limits", "drains", "prompt_tokens_from_cache", "preemptions", "deferrals"),
    *(column.format(each) for column in WAITS.values() for each in STATISTICS),
)


@dataclass(frozen=True, eq=False)
class Serving:
    """Requests, the engines that serve them, seconds of their steps, and the limits that users set."""

    requests: Requests
    fleet: Fleet
    table: StepTable
    limits: Limits
    gpus: int  # of all engines
    rebalancing: Rebalancing | None = None  # where requests have topics
    buffering: RequestBuffering | None = None  # where requests wait for others at a layer

    def at(
        self,
        rate: float | None = None,
        token_times: bool = False,
        steps: bool = False,
        goes_on: Callable[[Requests, Served], bool] | None = None,
    ) -> tuple[Requests, Served]:
        """The requests, at another rate where one is given, and what becomes of them for as long as it `goes_on`."""
        requests = self.requests if rate is None else at_rate(self.requests, rate)
        planned = self.planned if rate is None else self._planned(requests)
        changes, asks = planned.changes if planned else (), None if goes_on is None else partial(goes_on, requests)
        given = (token_times, steps, changes, asks, self.buffering)
        return requests, serve(requests, self.fleet, self.table, self.table, *given)

    def first(self, count: int) -> "Serving":
        """The same of the first `count` requests alone; itself where there are no more."""
        if len(self.requests) <= count:
            return self
        waits = self.buffering and replace(self.buffering, first=self.buffering.first[:count])
        return replace(self, requests=self.requests.window(0, count), buffering=waits)

    @property
    def rate(self) -> float | None:
        """The mean rate at which requests come, 1/s; None for users of a closed loop, and where all come at once."""
        own = mean_rate(self.requests)
        return own if self.fleet.users is None and np.isfinite(own) else None

    @cached_property
    def planned(self) -> Planned | None:
        """Loads and places of experts that the requests find over time, at their own rate; None without topics."""
        return self._planned(self.requests)

    def _planned(self, requests: Requests) -> Planned | None:
        own = self.rebalancing
        return None if own is None else own.planned(requests, self.fleet.all_engines)

    @property
    def identity(self) -> str:
        """A hash of all that decides how a run comes out at each rate."""
        asked, terms = self.requests, self.table.terms
        arrays = [asked.arrival, asked.prompt, asked.output, asked.prefix_starts, asked.prefix_blocks, asked.topic]
        arrays += [array for term in terms for array in (*term.grids, term.values)]
        found = sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
        names = [(term.name, term.features, term.scope, term.weight) for term in terms]
        found.update(repr((asked.prefix_tokens, self.fleet, self.limits, names)).encode())
        if self.rebalancing is not None:
            found.update(self.rebalancing.identity)
        if self.buffering is not None:
            found.update(self.buffering.identity)
        return found.hexdigest()[:16]

    def forbids(self, rate: float) -> Forbids:
        """Why a rate is not served."""
        requests, served = self.at(rate, steps=True)
        return what_forbids(requests, served, self.fleet, self.limits)


def answers(serving: Serving, requests: Requests, served: Served) -> dict[str, Any]:
    """Waits of users, by mean and percentiles, and how much is served within their limits."""
    waits, span = waits_of(requests, served), span_of(requests, served)
    within = waits.within(serving.limits)
    return {
        "requests": len(requests),
        "gpus": serving.gpus,
        "span_s": span,
        "waits_s": {name: distribution(values) for name, values in waits._asdict().items()},
        "sent_per_s": serving.rate and mean_rate(requests),
        "requests_per_s": len(requests) / span,
        "output_tokens_per_s": float(requests.output.sum()) / span,
        "goodput_per_s": float(within.sum()) / span,
        "within_limits": float(within.mean()),
        "drains": drained_rate(served) is None,
        "prompt_tokens_from_cache": float(served.cached.sum() / requests.prompt.sum()),
        "preemptions": int(served.preemptions.sum()),
        "deferrals": int(served.deferrals.sum()),
    }


def ends_late(told: Mapping[str, Any]) -> bool:
    """Whether engines keep up, and yet `answers` has a tenth less requests/s served than come.

    Requests come for a shorter time than it takes to answer the last of them, and what is served is over all of it.
    """
    sent = told["sent_per_s"]
    return sent is not None and bool(told["drains"]) and told["requests_per_s"] < 0.9 * sent


def moves_told(planned: Planned) -> dict[str, Any]:
    """How even experts were placed, and what moving them took, of one engine."""
    return {
        "imbalance": planned.imbalance,
        "moves": len(planned.moves),
        "moved_bytes": sum(move.moved_bytes for move in planned.moves),
        "pause_s": sum(move.pause_s for move in planned.moves),
        "each": [move._asdict() for move in planned.moves],
    }


def row_of(told: dict[str, Any]) -> Row:
    """Answers as a row of a table: `COLUMNS`, all numbers, with a column for each statistic of each wait."""
    row = {name: told.get(name) for name in COLUMNS}
    for name, column in WAITS.items():
        row |= {column.format(each): value for each, value in (told["waits_s"][name] or {}).items()}
    return {name: None if value is None else float(value) for name, value in row.items()}


def check_drains(serving: Serving, arrivals: RandomArrivals, served: Served) -> None:
    """Raise `InputError` where requests come at random faster than they can ever be served, with what could be."""
    most, engines = drained_rate(served), serving.fleet.engines
    if most is not None:
        drain = "1 engine drains" if engines == 1 else f"{engines} engines drain"
        raise InputError(
            f"serving.arrivals.rate_per_s is {arrivals.rate_per_s:g}; expected less than {most:.3g}, which is what "
            f"{drain} while requests wait. Lower it, or raise serving.engines"
        )
