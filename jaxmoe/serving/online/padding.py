"""Steps of few tokens are padded to the next size that a backend has captured as a CUDA graph, on all ranks alike."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxmoe.serving.online.step_table import Term

Sizes = Float[np.ndarray, " G"]


def graph_sizes(seats: int) -> tuple[int, ...]:
    """Tokens for which vLLM captures graphs by default, `VllmConfig._set_cudagraph_sizes` of vLLM 0.19."""
    most = min(2 * seats, 512)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= most)


@dataclass(frozen=True)
class Padding:
    """The captured sizes in ascending order, none where nothing is padded."""

    sizes: tuple[int, ...] = ()

    def points(self, sizes: Sizes) -> Float[np.ndarray, " P"]:
        """Sizes for a table that is exact for whole tokens where they are padded: there, the ends of each stretch."""
        if not self.sizes:
            return sizes
        captured = np.array(self.sizes, float)
        return np.unique([1.0, *captured, *(captured + 1), *sizes[sizes > captured[-1]]])

    def padded(self, tokens: Sizes) -> Sizes:
        """Tokens that are computed for so many."""
        if not self.sizes:
            return tokens
        up = np.array(self.sizes, float)[np.minimum(np.searchsorted(self.sizes, tokens), len(self.sizes) - 1)]
        return np.where(tokens <= self.sizes[-1], up, tokens)

    def common(self, name: str, points: Sizes, ranks: int, seconds: Callable[[Sizes], Sizes]) -> Term:
        """The term of a part that `ranks` do together, by its seconds for the tokens of all of them.

        `points` are tokens of a rank. Where the fullest rank is padded, all have as many tokens as it then has.
        """
        every, padded = ranks * points, seconds(ranks * self.padded(points))
        if ranks == 1:
            return Term(name, ("tokens",), (points,), padded, "group")
        if not self.sizes:
            return Term(name, ("all_tokens",), (every,), padded, "group")
        small = points <= self.sizes[-1]
        most = np.array([*points[small], self.sizes[-1] + 1, self.sizes[-1] + 2])  # the last two: nothing is padded
        rows = [np.full(len(every), each) for each in padded[small]] + 2 * [seconds(every)]
        return Term(name, ("most_tokens", "all_tokens"), (most, every), np.stack(rows), "group")
