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
    "tokens",  # of prompts and of outputs
    "sequences",  # that get a token in this step, so need the head
    "prefill",  # tokens of prompts that are read
    "prefill_context",  # tokens of the same prompt before the step, a mean over tokens read
    "decoding",  # sequences that get a further token
    "context",  # tokens before it, a mean over these sequences
    "longest",  # the longest of these contexts
    "all_tokens",
    "most_tokens",
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

    def seconds(self, features: Float[np.ndarray, "ranks F"]) -> float:
        """Seconds of a step; ranks without tokens count as idle, and a step without any takes none."""
        if not features[:, FEATURES.index("tokens")].any():
            return 0.0
        own = [sum(_read(term, rank) for term in self.terms if term.scope == "rank") for rank in features]
        common = sum(_read(term, features[0]) for term in self.terms if term.scope == "group")
        return float(max(own) + common)


def _read(term: Term, rank: Float[np.ndarray, " F"]) -> float:
    values = term.values
    for name, grid in zip(term.features, term.grids, strict=True):
        at = max(rank[FEATURES.index(name)], grid[0])
        if len(grid) == 1:
            values = values[0]
            continue
        low = min(int(np.searchsorted(grid, at, side="right")) - 1, len(grid) - 2)
        part = (at - grid[low]) / (grid[low + 1] - grid[low])
        values = values[low] + part * (values[low + 1] - values[low])
    return term.weight * float(values)
