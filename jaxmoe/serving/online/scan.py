"""A part of the simulator as a `lax.scan` over steps: latencies have gradients with respect to what steps take.

The part: one engine of one rank, which reads prompts and decodes in one step as vLLM does, first come first served, a
budget of tokens, seats, and how much of each prompt the cache has as input. KV does not run out. Who is in which step
is decided by comparisons, so gradients hold as long as no arrival changes sides with the start of a step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.serving.online.step_table import FEATURES, StepTable

StepSeconds = Callable[[Float[Array, " F"]], Float[Array, ""]]


class ScanRequests(NamedTuple):
    """`R` requests in the order in which they come; one that comes at infinity is none."""

    arrival: Float[Array, " R"]  # s
    prompt: Int[Array, " R"]  # tokens
    output: Int[Array, " R"]  # tokens
    cached: Int[Array, " R"]  # tokens of the prompt that need not be computed, fewer than it has


class Scanned(NamedTuple):
    """Of `R` requests and `S` steps, s. What was not served in so many steps has -1; steps after the last take 0."""

    first_token: Float[Array, " R"]
    finish: Float[Array, " R"]
    ends: Float[Array, " S"]
    tokens: Bool[Array, "S R"]  # who had a token at the end of a step


class _State(NamedTuple):
    now: Float[Array, ""]
    computed: Int[Array, " R"]
    tokens: Int[Array, " R"]  # of the output so far
    first_token: Float[Array, " R"]
    finish: Float[Array, " R"]


def serve_by_scan(requests: ScanRequests, seconds: StepSeconds, token_budget: int, seats: int, steps: int) -> Scanned:
    """Serve requests in so many steps, each of which takes `seconds` of its features, in the order of `FEATURES`.

    `jit` with the last three static. Give it 64-bit numbers: sums of many steps decide who is in which.
    """

    def step(state: _State, _: None) -> tuple[_State, tuple[Array, Array]]:
        ended = state.tokens == requests.output
        to_come = jnp.min(jnp.where(ended, jnp.inf, requests.arrival))
        now = jnp.where(jnp.isinf(to_come), state.now, jnp.maximum(state.now, to_come))
        here = ~ended & (requests.arrival <= now)
        left = requests.prompt + state.tokens - state.computed
        wanted = jnp.where(here & (jnp.cumsum(here) <= seats), left, 0)
        given = jnp.clip(token_budget - (jnp.cumsum(wanted) - wanted), 0, wanted)
        took = jnp.where(here.any(), seconds(_features(state, given, left)), 0.0)
        got = (given == left) & (given > 0)
        end, tokens = now + took, state.tokens + got
        after = _State(
            now=end,
            computed=state.computed + given,
            tokens=tokens,
            first_token=jnp.where(got & (tokens == 1), end, state.first_token),
            finish=jnp.where(got & (tokens == requests.output), end, state.finish),
        )
        return after, (end, got)

    never = jnp.full_like(requests.arrival, -1)
    start = _State(jnp.zeros_like(never[0]), requests.cached, jnp.zeros_like(requests.output), never, never)
    end, (ends, got) = jax.lax.scan(step, start, length=steps)
    return Scanned(end.first_token, end.finish, ends, got)


def _features(state: _State, given: Int[Array, " R"], left: Int[Array, " R"]) -> Float[Array, " F"]:
    decodes = (given > 0) & (state.tokens > 0) & (left == 1)
    read, decoding, contexts = jnp.where(decodes, 0, given), decodes.sum(), jnp.where(decodes, state.computed, 0)
    values = {
        "tokens": given.sum(),
        "sequences": ((given > 0) & (given == left)).sum(),
        "prefill": read.sum(),
        "prefill_context": (read * state.computed).sum() / jnp.maximum(read.sum(), 1),
        "decoding": decoding,
        "context": contexts.sum() / jnp.maximum(decoding, 1),
        "longest": contexts.max(),
        "all_tokens": given.sum(),
        "most_tokens": given.sum(),
        "routed": given.sum(),
        "loaded": 0,
    }
    return jnp.stack([jnp.asarray(values[name], state.now.dtype) for name in FEATURES])


def seconds_of(table: StepTable, values: Sequence[Float[Array, "..."]]) -> StepSeconds:
    """`table.seconds` of one rank as JAX computes it, with other `values` of its terms, for gradients."""

    def seconds(features: Float[Array, " F"]) -> Float[Array, ""]:
        total = jnp.zeros((), features.dtype)
        for term, own in zip(table.terms, values, strict=True):
            for name, points in zip(term.features, term.grids, strict=True):
                if len(points) == 1:
                    own = own[0]
                    continue
                grid = jnp.asarray(points, features.dtype)
                at = jnp.maximum(features[FEATURES.index(name)], grid[0])
                low = jnp.clip(jnp.searchsorted(grid, at, side="right") - 1, 0, len(points) - 2)
                part = (at - grid[low]) / (grid[low + 1] - grid[low])
                own = own[low] + part * (own[low + 1] - own[low])
            total += term.weight * own
        return total

    return seconds
