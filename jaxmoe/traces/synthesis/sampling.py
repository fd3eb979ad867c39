"""Traces of any length drawn from a process, in parts, with a few threads ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxmoe.threads import cores
from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.synthesis.process import Deal, GatingProcess, Preferences
from jaxmoe.traces.trace import GatingTrace, TraceError

# Jobs in threads: a few ahead of whoever takes their results, which come in order.

TICK = 0.1  # seconds between reports

Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called by a job with how much of it is done. It raises `CancelledError` when nobody wants the rest."""


def in_order(
    jobs: Sequence[Callable[[Progress], Result]], workers: int, report: Callable[[int], None]
) -> Iterator[Result]:
    """Runs jobs in threads and yields their results in the order of the jobs.

    At most `workers` jobs run, or hold a finished result, besides the one whose result comes next.

    `report` is called now and then, by the caller's thread, with how much is done of all jobs; what it raises ends
    them, as does closing the iterator.
    """
    done = [0] * len(jobs)
    stop = Event()

    def run(index: int) -> Result:
        def progress(amount: int) -> None:
            if stop.is_set():
                raise CancelledError
            done[index] = amount

        return jobs[index](progress)

    def result(job: Future[Result]) -> Result:
        while not wait((job,), timeout=TICK).done:
            report(sum(done))
        return job.result()

    pool, pending = ThreadPoolExecutor(workers), deque[Future[Result]]()
    try:
        for index in range(len(jobs)):
            pending.append(pool.submit(run, index))
            if len(pending) > workers:
                yield result(pending.popleft())
        while pending:
            yield result(pending.popleft())
        report(sum(done))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


# Drawing traces from a process: requests side by side, tokens one after the other, layers from below.
#
# The K choices of a token are the first K arrivals of a race in which expert e arrives after an exponential time of
# rate exp(log-weight). After each arrival the rates change by what co-activation adds; as exponential times have no
# memory, what is left of each only has to be stretched. So one draw per expert gives an exact sample without
# replacement.

LANES = 256  # requests side by side: enough to fill the arithmetic units of a few cores
SEGMENT = 32  # tokens of each lane in one call
WAVE_TOKENS = 2**16  # drawn by one thread before any is handed on
FAR = 60.0  # log-weights: whatever is further apart is taken for this far
LATEST = 1e30  # beyond every arrival that is not put off by choices, and finite

Report = Callable[[int, int], None]
"""Called with the tokens drawn and the tokens in all."""


LOGITS = "synthetic: log-odds of the process with the noise that they were drawn with, not a router's"


def sample_trace(
    process: GatingProcess, tokens: int, seed: int, report: Report | None = None, logits: float | None = None
) -> GatingTrace:
    """A trace of this many tokens. The same process, seed and machine give the same trace.

    With `logits` it has logits of its own, whose largest K are the choices, in their order: how late every expert came
    in the race, as -log(time), times that number. Choices do not depend on their scale; what a bias does to them does.
    """
    deal = process.requests.deal(tokens, seed)
    drawn = [*zip(*sample_parts(process, deal, seed, report, logits), strict=True)]
    return GatingTrace(
        experts=np.concatenate(drawn[0]),
        num_experts=process.num_experts,
        layer_ids=np.asarray(process.layer_ids),
        seq_start=deal.seq_start,
        is_repeat=None,
        facts=facts_of(process, logits),
        phase=deal.phases(),
        logits=None if logits is None else np.concatenate(drawn[1]),
    )


def facts_of(process: GatingProcess, logits: float | None) -> dict[str, str]:
    """Facts of a trace of this process, and whose its logits are."""
    return process.facts | ({} if logits is None else {"logit_source": LOGITS})


Drawn = tuple[np.ndarray, np.ndarray]
"""Experts int16 [token, layer, top_k], and logits float32 [token, layer, expert], or of no experts."""


def sample_parts(
    process: GatingProcess, deal: Deal, seed: int, report: Report | None = None, logits: float | None = None
) -> Iterator[Drawn]:
    """Choices and logits of the requests in order, some requests at a time; logits as of `sample_trace`.

    What a request gets depends on the seed, its place in the deal and its own tokens alone. One thread for each core
    draws: a program runs on one of them, for all but the largest models.
    """
    scale = np.float32(0.0 if logits is None else logits)
    parts = _sampled_parts(process, deal, seed, report, logits is not None)
    return ((experts, scale * values) for experts, values in parts)


def _sampled_parts(
    process: GatingProcess, deal: Deal, seed: int, report: Report | None, logits: bool
) -> Iterator[Drawn]:
    workers, tokens = cores(), int(deal.length.sum())
    number = (np.cumsum(deal.length) - 1) // min(WAVE_TOKENS, -(-tokens // workers))
    waves = np.split(np.arange(len(deal.length)), np.flatnonzero(np.diff(number)) + 1)
    jobs = [partial(_sample_wave, process, deal, wave, seed, logits) for wave in waves]
    return in_order(jobs, workers, lambda drawn: None if report is None else report(drawn, tokens))


def _sample_wave(
    process: GatingProcess, deal: Deal, wave: np.ndarray, seed: int, logits: bool, progress: Progress
) -> Drawn:
    """Draw some requests. Reports the tokens drawn after each call."""
    length = deal.length[wave]
    # No more lanes than the longest request leaves work for: the others would draw for nothing until it is done.
    # A power of two, so that few programs are compiled.
    lanes = min(LANES, 2 ** (int(length.sum() // length.max()).bit_length() - 1))
    lane, offset, steps = _packed(length, lanes)
    steps += -steps % SEGMENT
    row = np.repeat(np.arange(len(wave)), length)
    position = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
    at = (offset[row] + position, lane[row])  # where each token is drawn
    request = wave[row]
    inputs = np.zeros((4, steps, lanes), np.int32)
    inputs[:, *at] = request, position, deal.topic(request, position), deal.phase(request, position)
    before = jnp.asarray(np.zeros((len(process.layer_ids), lanes, process.top_k), np.int32))
    drawn = np.empty((steps, *before.shape), np.int16)
    values = np.empty((steps, *before.shape[:2], process.num_experts if logits else 0), np.float32)
    limits = (process.top_k, process.expert_groups, process.groups_per_token)
    for start in range(0, steps, SEGMENT):
        part = slice(start, start + SEGMENT)
        key, given = jax.random.key(seed), inputs[:, part]
        before, (experts, times) = _advance(process.preferences, key, before, given, limits=limits, logits=logits)
        drawn[part], values[part] = experts, times
        progress(int((at[0] < part.stop).sum()))
    return drawn[at[0], :, at[1]], values[at[0], :, at[1]]


def _packed(length: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Lane and first step of every request, and steps in all: the longest first, each to the emptiest lane."""
    lane, offset = np.zeros(len(length), int), np.zeros(len(length), int)
    filled = np.zeros(lanes, int)
    for request in np.argsort(-length, kind="stable"):
        lane[request] = filled.argmin()
        offset[request] = filled[lane[request]]
        filled[lane[request]] += length[request]
    return lane, offset, int(filled.max())


@partial(jax.jit, static_argnames=("limits", "logits"))
def _advance(
    preferences: Preferences,
    key: Key[Array, ""],
    before: Int[Array, "layer lane top_k"],
    segment: Int[np.ndarray, "4 step lane"] | Int[Array, "4 step lane"],
    *,
    limits: tuple[int, int, int],
    logits: bool,
) -> tuple[
    Int[Array, "layer lane top_k"], tuple[Int[Array, "step layer lane top_k"], Float[Array, "step layer lane _"]]
]:
    """Draw the next tokens of every lane, and their logits or none.

    `segment`: their request, position in it, topic, phase.
    """
    layers, experts = preferences.popularity.shape
    opening = preferences.opening[:, None]
    # The first layer has none below it, whatever the table says.
    from_layer = preferences.from_layer.at[0].set(0.0)
    slowdown = jnp.exp(jnp.clip(-preferences.together, -FAR, FAR))

    def token(
        before: Int[Array, "layer lane top_k"], inputs: Int[Array, "4 lane"]
    ) -> tuple[Array, tuple[Array, Array]]:
        request, position, topic, phase = inputs
        keys = jax.vmap(lambda r, p: jax.random.fold_in(jax.random.fold_in(key, r), p))(request, position)
        times = jax.vmap(lambda k: jax.random.exponential(k, (layers, experts)), out_axes=1)(keys)
        from_token = jax.vmap(lambda table, chosen: table[chosen].sum(axis=1))(preferences.from_token, before)
        log_weights = preferences.background(topic, phase, position)
        log_weights += jnp.where((position == 0)[:, None], opening, from_token)

        def layer(below: Int[Array, "lane top_k"], row: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            table, slowdown, log_weights, times = row
            log_weights += table[below].sum(axis=1)
            behind = log_weights.max(axis=1, keepdims=True) - log_weights
            chosen, when = race(times * jnp.exp(jnp.minimum(behind, FAR)), slowdown, limits)
            return chosen, (chosen, _as_logits(when, chosen) if logits else when[:, :0])

        _, (chosen, values) = jax.lax.scan(layer, before[0], (from_layer, slowdown, log_weights, times))
        return chosen, (chosen.astype(jnp.int16), values)

    return jax.lax.scan(token, before, jnp.swapaxes(segment, 0, 1))


def race(
    arrival: Float[Array, "lane expert"], slowdown: Float[Array, "expert expert"], limits: tuple[int, int, int]
) -> tuple[Int[Array, "lane top_k"], Float[Array, "lane expert"]]:
    """The first `top_k` arrivals, in order, and when all come: those not chosen as if no more were.

    After expert e arrives, what is left of the others is stretched by row e of `slowdown`. `limits` are top_k,
    the number of groups and how many of them a token may choose from.
    """
    top_k, groups, groups_per_token = limits
    arrival = _within_groups(arrival, groups, groups_per_token)
    index = jnp.arange(arrival.shape[1], dtype=jnp.int32)
    now, when = jnp.zeros_like(arrival[:, :1]), jnp.full_like(arrival, jnp.inf)
    chosen = []
    for _ in range(top_k):
        first = arrival.min(axis=1, keepdims=True)
        # Comparing with the minimum is several times as fast as argmin here. Of a dead heat one wins.
        chosen.append(jnp.where(arrival == first, index, 0).max(axis=1))
        now = now + first
        when = jnp.where(index == chosen[-1][:, None], now, when)
        out = (arrival == jnp.inf) | (index == chosen[-1][:, None])
        left = jnp.minimum((arrival - first) * slowdown[chosen[-1]], LATEST)
        arrival = jnp.where(out, jnp.inf, left)
    return jnp.stack(chosen, axis=1), jnp.where(when == jnp.inf, now + arrival, when)


def _as_logits(when: Float[Array, "lane expert"], chosen: Int[Array, "lane top_k"]) -> Float[Array, "lane expert"]:
    """-log(time), finite; what was not chosen stays below what was, where rounding would make them alike."""
    logits = -jnp.log(jnp.clip(when, 1 / LATEST, LATEST))
    taken = (chosen[..., None] == jnp.arange(when.shape[1])).any(axis=1)
    least = jnp.where(taken, logits, jnp.inf).min(axis=1, keepdims=True)
    return jnp.where(taken, logits, jnp.minimum(logits, jnp.nextafter(least, -jnp.inf)))


def _within_groups(arrival: Float[Array, "lane expert"], groups: int, allowed: int) -> Float[Array, "lane expert"]:
    """Arrivals of the groups whose first experts come earliest; all others never arrive."""
    if groups == allowed:
        return arrival
    best = arrival.reshape(len(arrival), groups, -1).min(axis=2)
    _, first = jax.lax.top_k(-best, allowed)
    open_to = (first[..., None] == jnp.arange(groups)).any(axis=1)
    return jnp.where(jnp.repeat(open_to, arrival.shape[1] // groups, axis=1), arrival, jnp.inf)


# Requests as they arrived, and how often experts are chosen while a mixture of scenarios drifts.


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order in which they arrive: when, s, and tokens of prompt and answer, all [request]."""

    seconds: Float[np.ndarray, " request"]
    prompt: Int[np.ndarray, " request"]
    answer: Int[np.ndarray, " request"]

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.prompt) == len(self.answer) > 0:
            raise TraceError("arrivals need one time, prompt and answer for each of at least one request")
        if (np.diff(self.seconds) < 0).any() or min(self.prompt.min(), self.answer.min()) < 0:
            raise TraceError("arrivals must be in order of time, with prompts and answers of no less than 0 tokens")


def read_arrivals(path: Path) -> Arrivals:
    """Read `arrival_s`, `context_tokens` and `generated_tokens` of an `.npz`. Raises `TraceError` without them."""
    arrays = read_arrays(path)
    names = ("arrival_s", "context_tokens", "generated_tokens")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise TraceError(f"{path}: has no {', '.join(missing)}; expected the arrays {', '.join(names)}")
    return Arrivals(*(arrays[name] for name in names))


def drawn_counts(
    shares: Float[np.ndarray, "scenario layer expert"],
    mixture: Float[np.ndarray, "iteration scenario"],
    choices: int,
    seed: int,
) -> Int[np.ndarray, "iteration layer expert"]:
    """Choices of every expert in iterations of `choices` choices each, drawn one by one from the mixture's shares.

    That a token's choices are different experts is left out: it makes counts a little more even than this.
    """
    expected = np.einsum("is,sle->ile", mixture, shares)
    expected /= expected.sum(axis=2, keepdims=True)
    return np.random.default_rng((seed, 2)).multinomial(choices, expected).astype(np.int32)
