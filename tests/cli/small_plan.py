"""A plan for the small scenario."""

import numpy as np

LAYERS = (3, 5)


def some_shares() -> np.ndarray:
    """Two layers of four experts on four nodes: one tensor parallel, one of halves on neighbours."""
    halves = (np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2
    return np.stack([np.full((4, 4), 0.25), halves]).astype(np.float32)
