"""Annealing schedules."""

from jaxtyping import Array, Float


def geometric(start: float, stop: float, progress: Float[Array, ""] | float) -> Float[Array, ""] | float:
    """From `start` at progress 0 to `stop` at progress 1, by equal ratios."""
    return start * (stop / start) ** progress
