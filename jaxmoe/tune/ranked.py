"""Plans with the exchange that serves each layer best, and what that takes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

Plan = Float[np.ndarray, "layer expert node"]
Plans = Float[np.ndarray, "layer candidate expert node"]
Scores = Float[np.ndarray, "layer candidate"]


class Ranked(NamedTuple):
    """A plan, its objective, s, and the name of its exchange, layer by layer."""

    plan: Plan
    seconds: Float[np.ndarray, " layer"]
    exchange: Shaped[np.ndarray, " layer"]  # str


def least(ranked: Iterable[Ranked]) -> Ranked:
    """The fastest of several in every layer; among equals the first."""
    given = list(ranked)
    row, chosen = np.arange(len(given[0].seconds)), np.stack([each.seconds for each in given]).argmin(axis=0)
    plans, seconds, names = (np.stack([each[part] for each in given]) for part in range(3))
    return Ranked(plans[chosen, row], seconds[chosen, row], names[chosen, row])


def better(plans: Plans, scores: Scores, others: Plans, other_scores: Scores) -> tuple[Plans, Scores]:
    """The better of two plans, candidate by candidate."""
    chosen = other_scores < scores
    return np.where(chosen[..., None, None], others, plans), np.where(chosen, other_scores, scores)


def best(
    plans: Plans, scores: Scores, count: int
) -> tuple[Float[np.ndarray, "layer best expert node"], Float[np.ndarray, "layer best"]]:
    """The best candidates of every layer, best first."""
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(plans, order[..., None, None], axis=1), np.take_along_axis(scores, order, axis=1)
