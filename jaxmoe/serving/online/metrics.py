"""Waiting times of users, and how many requests a second are served within limits.

Of request r: arrival a, first step s, first token f, last token e, and o output tokens. All times are in seconds.

    queue         s - a
    first token   f - a                  (TTFT)
    per token     (e - f) / (o - 1)      (TPOT), of requests with o > 1
    between       t[k + 1] - t[k]        (inter-token latency), every gap of every request
    end to end    e - a
    span          max e - min a
    output rate   sum o / span
    goodput       requests with first token and per token within their limits / span

A request of one token keeps any limit per token. Percentiles are linear between order statistics.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served

PERCENTILES = (50, 90, 95, 99)


class Limits(NamedTuple):
    """Seconds to the first token and per token that a request may take; a rate is served if `part` of all keep both."""

    first_token: float = math.inf
    per_token: float = math.inf
    part: float = 0.99


class Waits(NamedTuple):
    """Seconds that each request waits; `per_token` is NaN for one of a single token."""

    queue: Float[np.ndarray, " R"]
    first_token: Float[np.ndarray, " R"]
    per_token: Float[np.ndarray, " R"]
    end_to_end: Float[np.ndarray, " R"]

    def within(self, limits: Limits) -> Bool[np.ndarray, " R"]:
        """Which requests keep both limits."""
        slow = self.per_token > limits.per_token  # not where it is NaN
        return (self.first_token <= limits.first_token) & ~slow


def waits_of(requests: Requests, served: Served) -> Waits:
    """Waits of each request."""
    further = np.where(requests.output > 1, requests.output - 1, np.nan)
    return Waits(
        served.scheduled - served.sent,
        served.first_token - served.sent,
        (served.finish - served.first_token) / further,
        served.finish - served.sent,
    )


def span_of(requests: Requests, served: Served) -> float:
    """Seconds from the first arrival to the last token."""
    return float(served.finish.max() - served.sent.min())


def distribution(values: Float[np.ndarray, " N"]) -> dict[str, float] | None:
    """Mean and percentiles of the values that are there; None where none is."""
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    return {"mean": float(known.mean())} | {f"p{at}": float(np.percentile(known, at)) for at in PERCENTILES}


def goodput(requests: Requests, served: Served, limits: Limits) -> float:
    """Requests a second that keep their limits, 1/s."""
    return float(waits_of(requests, served).within(limits).sum()) / span_of(requests, served)


def gaps_between(served: Served) -> Float[np.ndarray, " N"]:
    """Seconds from each token of a request to its next, of all requests; `served` has token times."""
    return np.delete(np.diff(served.token_times), served.token_starts[1:-1] - 1)
