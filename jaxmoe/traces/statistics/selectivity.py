"""The metrics of camoe (A.4): how selective a whole model is, and how far its routing has shifted.

`load` counts tokens of each expert, [layer, expert]. The global figures add up experts of equal number over layers.
"""

import numpy as np
from jaxtyping import Float64, Real

from jaxmoe.traces.statistics import balance

Load = Real[np.ndarray, "layer expert"]

SMOOTHING = 1.0  # tokens; camoe does not say what its epsilon is


def global_cv(load: Load) -> float:
    """Coefficient of variation of loads added up over layers (Eq. 14)."""
    return float(balance.cv(load.sum(axis=0)))


def avg_layer_cv(load: Load) -> float:
    """Mean over layers of each one's coefficient of variation (Eq. 15, 16)."""
    return float(balance.cv(load).mean())


def global_kl(base: Load, other: Load, smoothing: float = SMOOTHING) -> float:
    """Divergence of `other` from `base`, nats, with loads added up over layers (Eq. 17, 18)."""
    return float(kl(base.sum(axis=0), other.sum(axis=0), smoothing))


def avg_layer_kl(base: Load, other: Load, smoothing: float = SMOOTHING) -> float:
    """Mean over layers of the divergence of `other` from `base`, nats (Eq. 19, 20)."""
    return float(kl(base, other, smoothing).mean())


def kl(
    base: Real[np.ndarray, "*lead expert"], other: Real[np.ndarray, "*lead expert"], smoothing: float = SMOOTHING
) -> Float64[np.ndarray, "*lead"]:
    """Kullback-Leibler divergence of two histograms, nats, with `smoothing` added to every count (Eq. 19)."""
    p, q = _distribution(base, smoothing), _distribution(other, smoothing)
    return np.asarray((p * np.log(p / q)).sum(axis=-1))


def _distribution(counts: Real[np.ndarray, "*lead expert"], smoothing: float) -> Float64[np.ndarray, "*lead expert"]:
    smooth = counts + float(smoothing)
    return smooth / smooth.sum(axis=-1, keepdims=True)
