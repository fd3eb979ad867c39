"""The highest rate that the work of requests leaves to engines: a bound, and an estimate of it.

A step of an engine reads q tokens of prompts and decodes n sequences on each of its ranks on average, in s(n, q)
seconds. Let x(n, q) be how many steps there are of each kind. To read P tokens and decode K on a rank takes at least

    W = min sum x s,    sum x q >= P,    sum x n >= K,    sum x n s <= K * limit per token,

as each token that is decoded waits for its step, and those of requests within their limits wait that long at most on
average. It is a linear programme. A rate at which W takes longer than users wait for the last of them is too high.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import FEATURES, StepTable

FINE_DECODING, FINE_READ = 8, 4  # sizes for each doubling
SHORTEST = (0.5, 1.0)  # parts of all requests, those of the shortest outputs, whose work bounds the rate


class RankWork(NamedTuple):
    """Tokens of prompts to read, and to decode at least and at most; tokens before them on average."""

    read: float
    least_decoded: float
    most_decoded: float
    before: float = 0.0
    context: float = 0.0


class Kinds(NamedTuple):
    """Kinds of steps: what each takes, what it does on a rank, and for how long sequences that decode wait in all."""

    seconds: Float[np.ndarray, " K"]
    decoding: Float[np.ndarray, " K"]
    read: Float[np.ndarray, " K"]
    waited: Float[np.ndarray, " K"]  # s


def least_seconds(kinds: Kinds, work: RankWork, per_token: float) -> float:
    """Seconds for the work of a rank, W; infinite where no kind of step keeps the limit per token, s."""
    from scipy.optimize import linprog  # takes long to import

    decoded = np.eye(len(kinds.seconds) + 1)[-1]  # K, the last of the unknowns
    rows = [-np.append(kinds.read, 0.0), decoded - np.append(kinds.decoding, 0.0)]
    if np.isfinite(per_token):
        rows.append(np.append(kinds.waited, 0.0) - per_token * decoded)
    most = np.array([-work.read, 0.0, 0.0])[: len(rows)]
    bounds = [(0, None)] * len(kinds.seconds) + [(work.least_decoded, work.most_decoded)]
    found = linprog(np.append(kinds.seconds, 0.0), np.stack(rows), most, bounds=bounds, method="highs")
    return float(found.fun) if found.status == 0 else np.inf


def rate_bound(requests: Requests, fleet: Fleet, table: StepTable, limits: Limits) -> float:
    """A rate, 1/s, over which too many requests are over their limits, in whatever order they are served.

    Of the requests with the shortest outputs, all but as many as may be late are done within their limits once the
    last of them has come. Contexts count as none, prefixes that several share as cached, and memory as endless. Needs
    a table that rises with tokens. Infinite without both limits.
    """
    if not (np.isfinite(limits.first_token) and np.isfinite(limits.per_token)):
        return np.inf
    pools = [(each, _least_kinds(each, table), count) for each, count in _pools(fleet)]
    read, further = _uncached(requests), requests.output - 1.0
    # 1 - 0.9 is a little less than 0.1, and must not make one request less of ten.
    may_be_late, bound = int((1 - limits.part) * len(requests) + 1e-6), np.inf
    for part in SHORTEST:
        longest = np.quantile(further, part)
        rows = np.flatnonzero(further <= longest)
        in_time = len(rows) - may_be_late
        if in_time < 1:
            continue
        least = [float(np.sort(each[rows])[:in_time].sum()) for each in (read, further)]
        work = RankWork(least[0], least[1], float(further[rows].sum()))
        wait = limits.first_token + longest * limits.per_token
        for (engine, kinds, count), own in zip(pools, _shared_out(fleet, work), strict=True):
            come = least_seconds(kinds, own, limits.per_token) / (count * engine.ranks) - wait
            bound = min(bound, _per_second(requests, rows, come))
    return float(bound)


def rate_estimate(requests: Requests, fleet: Fleet, table: StepTable, limits: Limits) -> float:
    """The rate, 1/s, at which engines are always busy with requests of mean lengths, as many at a time as memory holds.

    Prefixes that several share count as cached. Nobody waits for a first step, so the highest rate is mostly lower.
    """
    prompt, further = float(requests.prompt.mean()), float(requests.output.mean() - 1)
    context = prompt + further / 2
    work = RankWork(float(_uncached(requests).mean()), further, further, prompt / 2, context)
    seconds = 0.0
    for (engine, count), own in zip(_pools(fleet), _shared_out(fleet, work), strict=True):
        held = np.inf if engine.kv_blocks is None else engine.kv_blocks * engine.block_tokens / context
        n, q, *_ = _sizes(engine, min(engine.seats, max(held, 1.0)))
        took = table.seconds(_features(n, q, own, engine.ranks)[:, None])
        kinds = Kinds(took, n, q, n * took)
        seconds = max(seconds, least_seconds(kinds, own, limits.per_token) / (count * engine.ranks))
    return 1 / seconds if seconds > 0 else np.inf


def _per_second(requests: Requests, rows: np.ndarray, come: float) -> float:
    """The mean rate of all requests at which these come within so many seconds, none where they may come at once."""
    if come <= 0:
        return np.inf
    own = float(requests.arrival[-1] - requests.arrival[0])
    return (len(requests) - 1) / own * float(requests.arrival[rows[-1]] - requests.arrival[0]) / come


def _pools(fleet: Fleet) -> list[tuple[Engine, int]]:
    return [(fleet.engine, fleet.engines)] + ([(fleet.decode.engine, fleet.decode.engines)] if fleet.decode else [])


def _shared_out(fleet: Fleet, work: RankWork) -> list[RankWork]:
    """The work of each pool."""
    apart = [work._replace(least_decoded=0.0, most_decoded=0.0), work._replace(read=0.0)]
    return apart if fleet.decode else [work]


def _uncached(requests: Requests) -> Float[np.ndarray, " R"]:
    """Tokens of each prompt that no other request can have left in a cache."""
    if not len(requests.prefix_starts):
        return requests.prompt.astype(float)
    return np.maximum(requests.prompt - np.diff(requests.prefix_starts) * requests.prefix_tokens, 1.0)


class _Sizes(NamedTuple):
    """Sequences that decode and tokens that are read in a step, a mean over ranks, and the most that one stands for."""

    decoding: Float[np.ndarray, " K"]
    read: Float[np.ndarray, " K"]
    most_decoding: Float[np.ndarray, " K"]
    most_read: Float[np.ndarray, " K"]


def _sizes(engine: Engine, seats: float | int) -> _Sizes:
    decoding, reading = (
        _whole(FINE_DECODING, seats * engine.ranks),
        _whole(FINE_READ, engine.token_budget * engine.ranks),
    )
    n, q = (each.ravel() / engine.ranks for each in np.meshgrid(decoding, reading, indexing="ij"))
    most = [np.append(sizes[1:] - 1, sizes[-1]) for sizes in (decoding, reading)]
    most_n, most_q = (each.ravel() / engine.ranks for each in np.meshgrid(*most, indexing="ij"))
    some = (n + q > 0) & (n + q <= engine.token_budget)
    if engine.batching == "sglang":  # a rank does one or the other, and others beside it may not do the same
        some = (n == 0) ^ (q == 0) if engine.ranks == 1 else n + q > 0
    return _Sizes(n[some], q[some], most_n[some], most_q[some])


def _whole(fine: int, most: float | int) -> Float[np.ndarray, " S"]:
    """Whole numbers from 0 up to `most`, so many for each doubling."""
    powers = np.arange(0, np.log2(most), 1 / fine)
    return np.unique(np.append([0.0, float(int(most))], np.rint(2**powers)))


def _least_kinds(engine: Engine, table: StepTable) -> Kinds:
    """Kinds of steps, each of which takes no longer than any that it stands for and does as much as all of these.

    The rank that decodes most may be another one than that which reads most, or than that with most tokens: of each no
    more is known.
    """
    sizes, none = _sizes(engine, engine.seats), RankWork(0.0, 0.0, 0.0)
    n, q = sizes.decoding, sizes.read
    ranks = [_features(n, q, none, engine.ranks)]
    if engine.ranks > 1:
        ranks = [
            _features(n, q, none, engine.ranks, own) for own in ((n, n, 0 * q), (q, 0 * n, q), (n + q, 0 * n, 0 * q))
        ]
    seconds = table.seconds(np.stack(ranks, axis=1))
    return Kinds(seconds, sizes.most_decoding, sizes.most_read, n * seconds)


def _features(
    n: Float[np.ndarray, " K"],
    q: Float[np.ndarray, " K"],
    work: RankWork,
    ranks: int,
    own: tuple[Float[np.ndarray, " K"], ...] | None = None,
) -> Float[np.ndarray, "K F"]:
    """Features of a rank where ranks decode n and read q on average: its `own` tokens, those that decode, and those of
    prompts are as on average unless said.
    """
    tokens, decoding, read = (n + q, n, q) if own is None else own
    values = {
        "tokens": tokens,
        "sequences": decoding,
        "prefill": read,
        "prefill_context": work.before + 0 * n,
        "decoding": decoding,
        "context": work.context + 0 * n,
        "longest": work.context + 0 * n,
        "all_tokens": ranks * (n + q),
        "most_tokens": n + q,
        "routed": tokens,
        "loaded": 0 * n,
    }
    return np.stack([values[name] for name in FEATURES], axis=1)
