"""The highest rate that engines serve within limits, whether a rate drains, and what forbids more.

With Q(t) requests that have been sent and had no step yet at time t, and T the last arrival, a rate does not drain if
Q is never 0 from T/2 to T, and grows then by more than a tenth of the requests that come. What would drain is, from the
last time that Q was 0 until the last request has its first step, the larger of first steps and of last tokens a second.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits, waits_of
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served, StepLog

KEPT_UP = 0.9  # first steps for each request that comes
FULL = 0.8  # of a resource that requests wait for
FREE, NEXT, STEP = "nothing waits", "the next step", "step time"


def highest_rate(
    meets: Callable[[float], bool], start: float, tolerance: float = 0.01, most: int = 40, stride: float = 2.0
) -> float:
    """The highest rate that `meets` limits, 1/s: one within `tolerance` above it does not.

    Found by halving the ratio of a rate that does and one that does not, which are looked for from `start` on: the
    first ratio is `stride`, and each further one the square of the last up to 2. Zero where no rate of `most` such
    steps down does, infinite where all of as many up do.
    """
    rises = meets(start)
    low = high = start
    for _ in range(most):
        low, high = (high, high * stride) if rises else (low / stride, low)
        if meets(high if rises else low) != rises:
            break
        stride = min(stride**2, 2.0)
    else:
        return math.inf if rises else 0.0
    return between(meets, low, high, tolerance)


def between(meets: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """A rate from `low`, which meets limits, towards `high`, which does not: one within `tolerance` above does not."""
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def drained_rate(served: Served) -> float | None:
    """Requests a second that engines can drain, 1/s, where they were sent more; None where the queue empties."""
    last = float(served.sent.max())
    times = np.concatenate([served.sent, served.scheduled])
    change = np.repeat([1, -1], len(served.sent))
    order = np.lexsort((-change, times))
    queue, times = change[order].cumsum(), times[order]
    middle = served.sent.min() + (last - served.sent.min()) / 2
    empty = times[queue == 0]
    began = float(empty[empty <= last].max(initial=served.sent.min()))
    if began >= middle:
        return None
    come, begin = (np.sum((each > middle) & (each <= last)) for each in (served.sent, served.scheduled))
    if begin >= KEPT_UP * come:
        return None
    until = float(served.scheduled.max())
    most = max(np.sum((each > began) & (each <= until)) for each in (served.scheduled, served.finish))
    return float(most / (until - began))


def what_binds(steps: StepLog, fleet: Fleet) -> dict[str, float]:
    """Parts of the time of steps: those in which requests wait, by what is fullest then, and the rest.

    What is fullest is told by seats, KV blocks and tokens of a step over the most that there may be, of all ranks
    together. Where none of these is over `FULL`, requests wait for their next step.
    """
    decodes = steps.engine >= fleet.engines
    waits, seconds = steps.waiting > 0, float(steps.seconds.sum())
    found = {FREE: float(steps.seconds[~waits].sum()) / seconds, NEXT: 0.0}
    pools = [("", fleet.engine, ~decodes)] + ([("decode ", fleet.decode.engine, decodes)] if fleet.decode else [])
    for pool, engine, own in pools:
        fills = _fills(steps, engine)
        parts = np.array([*fills.values()])
        fullest = np.where(parts.max(axis=0) > FULL, parts.argmax(axis=0), -1)
        for index, name in [*enumerate(pool + each for each in fills), (-1, NEXT)]:
            here = own & waits & (fullest == index)
            found[name] = found.get(name, 0.0) + float(steps.seconds[here].sum()) / seconds
    return found


class Forbids(NamedTuple):
    """The limit that most requests are over at a rate, and what they wait for: a resource, or the steps themselves."""

    limit: str
    resource: str


def what_forbids(requests: Requests, served: Served, fleet: Fleet, limits: Limits) -> Forbids:
    """Why a rate is not served; `served` has its steps.

    A time per token over its limit is that of steps. A first token, and a queue where no request is over a limit, waits
    for the resource that is fullest for most of the time in which requests wait, and for steps where none do.
    """
    assert served.steps is not None
    waits = waits_of(requests, served)
    late, slow = (waits.first_token > limits.first_token).sum(), (waits.per_token > limits.per_token).sum()
    binds = {name: part for name, part in what_binds(served.steps, fleet).items() if name not in (FREE, NEXT)}
    resource = max(binds, key=lambda name: binds[name])
    if slow > late:
        return Forbids("time per token", STEP)
    return Forbids("time to first token" if late else "the queue", resource if binds[resource] > 0 else STEP)


def _fills(steps: StepLog, engine: Engine) -> dict[str, np.ndarray]:
    fills = {
        "seats": steps.running / (engine.seats * engine.ranks),
        "token budget": steps.tokens / (engine.token_budget * engine.ranks),
    }
    if engine.kv_blocks is not None:
        fills["KV blocks"] = steps.kv_blocks / (engine.kv_blocks * engine.ranks)
    return fills
