"""What predictors have in common: a state that remembers a request, and a step from token to token."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.traces.trace import PREFILL, GatingTrace

State = Any  # a pytree of arrays, of the predictor's own kind
Seen = TypeVar("Seen")


class History(eqx.Module):
    """Tokens in the order in which they were run; without the leading axis, one token."""

    experts: Int[Array, "*token layer top_k"]  # -1: missing
    start: Bool[Array, "*token"]  # first of a request
    prefill: Bool[Array, "*token"]  # of the part that the rest is to be predicted from


class AbstractPredictor(eqx.Module):
    """Ranks the experts of every layer just before a token chooses there.

    A pytree of what was fitted, with an `init` and a `step` that work under `jit`, `vmap` (over requests that
    run side by side) and `lax.scan`. A new request starts from `init` again, so nothing of the one before
    is remembered.
    """

    @abstractmethod
    def init(self, top_k: int) -> State:
        """What is remembered before the first token of a request."""

    @abstractmethod
    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        """The state after a token, and the scores made for it: not negative, the higher, the likelier.

        Scores of a layer depend on the state and on the token's choices in the layers before, nothing else.
        """


def history(trace: GatingTrace, prefill_tokens: int) -> History:
    """A trace as predictors see it. Where it does not state phases, requests have that many tokens of prefill."""
    start = np.zeros(trace.num_tokens, bool)
    start[trace.seq_start] = True
    since = np.arange(trace.num_tokens) - trace.seq_start[np.cumsum(start) - 1]
    prefill = since < prefill_tokens if trace.phase is None else trace.phase == PREFILL
    return History(jnp.asarray(trace.experts, jnp.int32), jnp.asarray(start), jnp.asarray(prefill))


def advance(predictor: AbstractPredictor, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
    """One step; the first token of a request finds the state as `init` gives it."""
    fresh = predictor.init(token.experts.shape[-1])
    state = jax.tree.map(lambda new, old: jnp.where(token.start, new, old), fresh, state)
    return predictor.step(state, token)


def replay(
    predictor: AbstractPredictor,
    state: State,
    tokens: History,
    look: Callable[[Float[Array, "layer expert"], Int[Array, "layer top_k"]], Seen],
) -> tuple[State, Seen]:
    """The state after all tokens, and what `look(scores, experts)` made of each, stacked over tokens.

    Looking inside the scan keeps the scores of long histories out of memory.
    """

    def step(state: State, token: History) -> tuple[State, Seen]:
        state, scores = advance(predictor, state, token)
        return state, look(scores, token.experts)

    return jax.lax.scan(step, state, tokens)


@eqx.filter_jit
def scores(predictor: AbstractPredictor, tokens: History) -> Float[Array, "token layer expert"]:
    """The scores made for every token, each before it was known."""
    return replay(predictor, predictor.init(tokens.experts.shape[-1]), tokens, lambda scores, _: scores)[1]
