"""Annealing schedules."""

import numpy as np
from jaxtyping import Float

Progress = Float[np.ndarray, "..."] | float


def geometric(start: float, stop: float, progress: Progress) -> Progress:
    """From `start` at progress 0 to `stop` at progress 1, by equal ratios."""
    return start * (stop / start) ** progress
