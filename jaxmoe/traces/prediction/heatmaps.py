"""Prediction from conditional probabilities: of the next token, or layer, given the experts just chosen.

The data-driven predictor of "wafer_scale_moe_data_movement", section IV-D5 and Fig. 10(b), and its relations
of Fig. 4 (layer to layer) and Fig. 5 (token to token).
"""

from abc import abstractmethod
from typing import TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.traces.prediction.frequency import shares
from jaxmoe.traces.prediction.predictor import AbstractPredictor, History, State
from jaxmoe.traces.statistics.counting import PairCounts
from jaxmoe.traces.trace import MISSING

Rows = TypeVar("Rows", bound="AbstractHeatmap")


class AbstractHeatmap(AbstractPredictor):
    """The sum of the rows of the given experts.

    A row is the share of each expert among the choices that followed. The last row, that of a missing expert
    (index -1), holds the shares among all choices: what is predicted where nothing is given.
    """

    rows: Float[Array, "layer given expert"]  # one more given than experts

    def init(self, top_k: int) -> State:
        return jnp.full((self.rows.shape[0], top_k), MISSING, jnp.int32)

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        layer = jnp.arange(self.rows.shape[0])[:, None]
        return token.experts, self.rows[layer, self.given(state, token)].sum(axis=1)

    @abstractmethod
    def given(self, last: Int[Array, "layer top_k"], token: History) -> Int[Array, "layer top_k"]:
        """The experts whose rows are looked up, from the last token's choices and this one's."""


class NextToken(AbstractHeatmap):
    """Given: what the token before chose in the same layer."""

    @classmethod
    def from_counts(cls, counts: PairCounts, prior: float) -> "NextToken":
        """Fitted to counted pairs; see `conditional_rows` for `prior`."""
        frequency = shares(counts.load)
        return cls(conditional_rows(jnp.asarray(counts.token_pairs, jnp.float32), frequency, prior))

    def given(self, last: Int[Array, "layer top_k"], token: History) -> Int[Array, "layer top_k"]:
        return last


class NextLayer(AbstractHeatmap):
    """Given: what the same token chose in the layer before. Nothing is given in the first layer."""

    @classmethod
    def from_counts(cls, counts: PairCounts, prior: float) -> "NextLayer":
        """Fitted to counted pairs; see `conditional_rows` for `prior`."""
        frequency = shares(counts.load)
        pairs = np.concatenate([np.zeros_like(counts.token_pairs[:1]), counts.layer_pairs])
        return cls(conditional_rows(jnp.asarray(pairs, jnp.float32), frequency, prior))

    def given(self, last: Int[Array, "layer top_k"], token: History) -> Int[Array, "layer top_k"]:
        return jnp.concatenate([jnp.full_like(token.experts[:1], MISSING), token.experts[:-1]])


def conditional_rows(
    pairs: Float[Array, "layer expert expert"], frequency: Float[Array, "layer expert"], prior: float
) -> Float[Array, "layer given expert"]:
    """The rows of a heatmap, each with a sum of 1, from how often expert j followed expert i, `pairs[layer, i, j]`.

    `prior` (> 0) is the number of choices by the frequencies that are added to each row, so that an expert
    rarely seen does not predict from chance.
    """
    weighed = pairs + prior * frequency[:, None]
    rows = weighed / weighed.sum(axis=-1, keepdims=True)
    return jnp.concatenate([rows, frequency[:, None]], axis=1)


def top_of_rows(heatmap: Rows, n: int) -> Rows:
    """The paper's rule: a row names its top `n` experts. Scores become votes, and the predicted set is `scores > 0`."""
    place = jnp.argsort(jnp.argsort(-heatmap.rows, axis=-1), axis=-1)
    return eqx.tree_at(lambda heatmap: heatmap.rows, heatmap, (place < n).astype(jnp.float32))
