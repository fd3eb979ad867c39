"""Predictors of the next choices: by frequency, by the layer before, by the prefill."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.relax import as_number
from jaxmoe.traces.statistics.counting import PairCounts
from jaxmoe.traces.trace import MISSING, PREFILL, GatingTrace

# What predictors have in common: a state that remembers a request, and a step from token to token.

State = Any  # a pytree of arrays, of the predictor's own kind
Seen = TypeVar("Seen")


class TokenHistory(eqx.Module):
    """Expert choices of tokens in the order in which they were run; without the leading axis, of one token."""

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
        """Returns the predictor's state before the first token of a request, a pytree of arrays; `()` if it has none.

        `top_k` is the number of experts that a token chooses.
        """

    @abstractmethod
    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        """The state after a token, and the scores made for it: not negative, the higher, the likelier.

        Scores of a layer depend on the state and on the token's choices in the layers before, nothing else.
        """


def history(trace: GatingTrace, prefill_tokens: int) -> TokenHistory:
    """A trace as predictors see it. Where it does not state phases, requests have that many tokens of prefill."""
    start = np.zeros(trace.num_tokens, bool)
    start[trace.seq_start] = True
    since = np.arange(trace.num_tokens) - trace.seq_start[np.cumsum(start) - 1]
    prefill = since < prefill_tokens if trace.phase is None else trace.phase == PREFILL
    return TokenHistory(jnp.asarray(trace.experts, jnp.int32), jnp.asarray(start), jnp.asarray(prefill))


def advance(
    predictor: AbstractPredictor, state: State, token: TokenHistory
) -> tuple[State, Float[Array, "layer expert"]]:
    """One step; the first token of a request finds the state as `init` gives it."""
    fresh = predictor.init(token.experts.shape[-1])
    state = jax.tree.map(lambda new, old: jnp.where(token.start, new, old), fresh, state)
    return predictor.step(state, token)


def replay(
    predictor: AbstractPredictor,
    state: State,
    tokens: TokenHistory,
    look: Callable[[Float[Array, "layer expert"], Int[Array, "layer top_k"]], Seen],
) -> tuple[State, Seen]:
    """The state after all tokens, and what `look(scores, experts)` made of each, stacked over tokens.

    Looking inside the scan keeps the scores of long histories out of memory.
    """

    def step(state: State, token: TokenHistory) -> tuple[State, Seen]:
        state, scores = advance(predictor, state, token)
        return state, look(scores, token.experts)

    return jax.lax.scan(step, state, tokens)


@eqx.filter_jit
def scores(predictor: AbstractPredictor, tokens: TokenHistory) -> Float[Array, "token layer expert"]:
    """The scores made for every token, each before it was known."""
    return replay(predictor, predictor.init(tokens.experts.shape[-1]), tokens, lambda scores, _: scores)[1]


# Prediction from how often experts were chosen: ever, lately, or in the last tokens.


def shares(load: np.ndarray) -> Float[Array, "layer expert"]:
    """Each expert's share of its layer's load [layer, expert]; even where nothing was counted."""
    total = load.sum(axis=-1, keepdims=True)
    return jnp.asarray(np.where(total > 0, load / np.maximum(total, 1), 1 / load.shape[-1]), jnp.float32)


def counts(experts: Int[Array, "layer top_k"], num_experts: int) -> Float[Array, "layer expert"]:
    """How often a token chose each expert, 0 or 1. Missing choices count for none."""
    return jax.nn.one_hot(experts, num_experts).sum(axis=-2)


class Frequency(AbstractPredictor):
    """The shares of experts in an earlier trace, constant over the request; the baseline of all predictors."""

    frequency: Float[Array, "layer expert"]

    def init(self, top_k: int) -> State:
        return ()

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        return state, self.frequency


class MovingAveragePredictor(AbstractPredictor):
    """Exponential moving average of the request's choices, from the shares of a trace seen before.

    After each token, average <- (1 - rate) average + rate (its choices as shares); a token all of whose choices
    are missing changes nothing.
    """

    frequency: Float[Array, "layer expert"]
    rate: Float[Array, ""]  # 0 to 1; about 2 / (tokens remembered + 1)

    def init(self, top_k: int) -> State:
        return self.frequency

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        chosen = counts(token.experts, self.frequency.shape[-1])
        known = chosen.sum(axis=-1, keepdims=True)
        latest = jnp.where(known > 0, chosen / jnp.maximum(known, 1), state)
        return state + self.rate * (latest - state), state


class RunningWindow(AbstractPredictor):
    """Choices counted over the last `window` tokens of the request; equal counts are ranked by frequency.

    A window of one token is the naive prediction that the last choice is repeated.
    """

    frequency: Float[Array, "layer expert"]
    window: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        layers = self.frequency.shape[0]
        recent = jnp.full((self.window, layers, top_k), -1, jnp.int32)
        return recent, jnp.zeros_like(self.frequency), jnp.zeros((), jnp.int32)

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        recent, counted, oldest = state
        num_experts = self.frequency.shape[-1]
        after = counted + counts(token.experts, num_experts) - counts(recent[oldest], num_experts)
        # Shares are at most 1, as much as one choice counts: halved, they only tell equal counts apart.
        return (recent.at[oldest].set(token.experts), after, (oldest + 1) % self.window), counted + self.frequency / 2


# Prediction from conditional probabilities: of the next token, or layer, given the experts just chosen.
#
# The data-driven predictor of "wafer_scale_moe_data_movement", section IV-D5 and Fig. 10(b), and its relations of Fig.
# 4 (layer to layer) and Fig. 5 (token to token).

Rows = TypeVar("Rows", bound="AbstractHeatmap")


class AbstractHeatmap(AbstractPredictor):
    """The sum of the rows of the given experts.

    A row is the share of each expert among the choices that followed. The last row, that of a missing expert
    (index -1), holds the shares among all choices: what is predicted where nothing is given.
    """

    rows: Float[Array, "layer given expert"]  # one more given than experts

    def init(self, top_k: int) -> State:
        return jnp.full((self.rows.shape[0], top_k), MISSING, jnp.int32)

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        layer = jnp.arange(self.rows.shape[0])[:, None]
        return token.experts, self.rows[layer, self.given(state, token)].sum(axis=1)

    @abstractmethod
    def given(self, last: Int[Array, "layer top_k"], token: TokenHistory) -> Int[Array, "layer top_k"]:
        """The experts whose rows are looked up, from the last token's choices and this one's."""


class NextToken(AbstractHeatmap):
    """Predicts from the experts that the previous token chose in the same layer."""

    @classmethod
    def from_counts(cls, counts: PairCounts, prior: float) -> "NextToken":
        """Fitted to counted pairs; see `conditional_rows` for `prior`."""
        frequency = shares(counts.load)
        return cls(conditional_rows(jnp.asarray(counts.token_pairs, jnp.float32), frequency, prior))

    def given(self, last: Int[Array, "layer top_k"], token: TokenHistory) -> Int[Array, "layer top_k"]:
        return last


class NextLayer(AbstractHeatmap):
    """Predicts from the experts that the same token chose in the layer before; in the first layer, by frequency."""

    @classmethod
    def from_counts(cls, counts: PairCounts, prior: float) -> "NextLayer":
        """Fitted to counted pairs; see `conditional_rows` for `prior`."""
        frequency = shares(counts.load)
        pairs = np.concatenate([np.zeros_like(counts.token_pairs[:1]), counts.layer_pairs])
        return cls(conditional_rows(jnp.asarray(pairs, jnp.float32), frequency, prior))

    def given(self, last: Int[Array, "layer top_k"], token: TokenHistory) -> Int[Array, "layer top_k"]:
        return jnp.concatenate([jnp.full_like(token.experts[:1], MISSING), token.experts[:-1]])


@jax.jit
def conditional_rows(
    pairs: Float[Array, "layer expert expert"], frequency: Float[Array, "layer expert"], prior: Float[Array, ""] | float
) -> Float[Array, "layer given expert"]:
    """The rows of a heatmap, each with a sum of 1, from how often expert j followed expert i, `pairs[layer, i, j]`.

    `prior` (> 0) is the number of choices by the frequencies that are added to each row, so that an expert
    rarely seen does not predict from chance.
    """
    weighed = pairs + prior * frequency[:, None]
    rows = weighed / weighed.sum(axis=-1, keepdims=True)
    return jnp.concatenate([rows, frequency[:, None]], axis=1)


# Prediction of a request's decode from its own prefill: Insight 1 of "wafer_scale_moe_data_movement", III-B4.


class PrefillLoad(AbstractPredictor):
    """Choices counted over the request's prefill, and `prior` choices by the frequencies of a trace seen before."""

    frequency: Float[Array, "layer expert"]
    prior: Float[Array, ""] = eqx.field(converter=as_number)

    def init(self, top_k: int) -> State:
        return jnp.zeros_like(self.frequency)

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        after = state + token.prefill * counts(token.experts, self.frequency.shape[-1])
        return after, state + self.prior * self.frequency


class PrefillHeatmap(AbstractPredictor):
    """Rows counted over the request's prefill, each with `prior` choices by the rows of a trace seen before."""

    heatmap: AbstractHeatmap
    prior: Float[Array, ""] = eqx.field(converter=as_number)

    def init(self, top_k: int) -> State:
        return self.heatmap.init(top_k), jnp.zeros_like(self.heatmap.rows)

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        last, pairs = state
        given = self.heatmap.given(last, token)
        layer = jnp.arange(len(given))[:, None]
        rows = pairs[layer, given] + self.prior * self.heatmap.rows[layer, given]
        predicted = (rows / rows.sum(axis=-1, keepdims=True)).sum(axis=1)
        # Missing choices fall outside and are dropped. As everywhere, what is given but missing has the last row.
        num_experts = predicted.shape[-1]
        chosen = jnp.where(token.experts < 0, num_experts, token.experts)
        counted = pairs.at[layer[..., None], given[:, :, None], chosen[:, None]].add(token.prefill, mode="drop")
        return (token.experts, counted), predicted
