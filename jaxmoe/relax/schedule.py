"""Annealing schedules."""

import numpy as np
from jaxtyping import Float


def geometric(start: float, stop: float, progress: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """From `start` at progress 0 to `stop` at progress 1, by equal ratios."""
    return start * (stop / start) ** progress
