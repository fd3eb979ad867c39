"""Seconds of a step of an engine as a sum of tables over a few numbers of the batch.

A table is data, so that a kernel profile, the shipped machines and a user's own measurements are served by the same
compiled engine. It is exact where it was asked and linear between.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

# Numbers of one rank's part of a step. `all_tokens` and `most_tokens` are over the ranks that step together.
FEATURES = (
    "tokens",  # of prompts and of outputs, whose attention is computed
    "sequences",  # that get a token in this step, so need the head
    "prefill",  # tokens of prompts that are read
    "prefill_context",  # tokens of the same prompt before the step, a mean over tokens read
    "decoding",  # sequences that get a further token
    "context",  # tokens before it, a mean over these sequences
    "longest",  # the longest of these contexts
    "all_tokens",
    "most_tokens",
    "routed",  # tokens that pass the experts; fewer than `tokens` in a layer where some wait, more where some go on
    "loaded",  # experts that these chose; 0 where nobody asks which, so only tables for `RequestBuffering` read it
)


class Term(NamedTuple):
    """Seconds over a grid of some features: linear between points, the first value below, the last slope above.

    A term of scope `rank` is each rank's own and the slowest decides; one of scope `group` is common to all ranks.
    """

    name: str
    features: tuple[str, ...]
    grids: tuple[Float[np.ndarray, " G"], ...]  # ascending, one for each feature
    values: Float[np.ndarray, "..."]  # s, one axis for each feature
    scope: Literal["rank", "group"] = "rank"
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class StepTable:
    """Terms whose sum is a step: that of the slowest rank's own terms, and of the common ones."""

    terms: tuple[Term, ...]

    def seconds(self, features: Float[np.ndarray, "*steps ranks F"]) -> Float[np.ndarray, "*steps"]:
        """Seconds of steps; ranks without tokens count as idle, and a step without any takes none."""
        of_rank = [_read(term, features) for term in self.terms if term.scope == "rank"]
        common = [_read(term, features[..., :1, :])[..., 0] for term in self.terms if term.scope == "group"]
        there = [FEATURES.index(name) for name in ("tokens", "sequences", "routed")]
        any_tokens = features[..., there].any(axis=(-2, -1))
        slowest = sum(of_rank, np.zeros(features.shape[:-1])).max(axis=-1)
        return np.where(any_tokens, slowest + sum(common, np.zeros(any_tokens.shape)), 0.0)


def _read(term: Term, features: Float[np.ndarray, "*rows F"]) -> Float[np.ndarray, "*rows"]:
    rows = features.reshape(-1, len(FEATURES))
    each = np.arange(len(rows))
    values = np.broadcast_to(term.values, (len(rows), *np.shape(term.values)))
    for name, grid in zip(term.features, term.grids, strict=True):
        if len(grid) == 1:
            values = values[:, 0]
            continue
        at = np.maximum(rows[:, FEATURES.index(name)], grid[0])
        low = np.minimum(np.searchsorted(grid, at, side="right") - 1, len(grid) - 2)
        part = (at - grid[low]) / (grid[low + 1] - grid[low])
        below, above = values[each, low], values[each, low + 1]
        values = below + part.reshape(-1, *[1] * (values.ndim - 2)) * (above - below)
    return term.weight * values.reshape(features.shape[:-1])
