"""How unequal loads are. The field has three figures for the largest load; each goes by its own name here.

Loads may be of experts or of nodes, in any unit. A figure is NaN where there is no load at all.
"""

import numpy as np
from jaxtyping import Float64, Real

Load = Real[np.ndarray, "*lead expert"]
Figure = Float64[np.ndarray, "*lead"]


def max_over_mean(load: Load) -> Figure:
    """The largest load over the mean: 1 when all are equal."""
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.divide(load.max(axis=-1), mean, out=np.full(mean.shape, np.nan), where=mean > 0)


def mean_over_max(load: Load) -> Figure:
    """The mean load over the largest: the part of the time that a part is busy on average."""
    return np.asarray(1 / max_over_mean(load))


def excess_over_mean(load: Load) -> Figure:
    """How far the largest load is above the mean, in means: the imbalance degree of moentwine (Eq. 2)."""
    return np.asarray(max_over_mean(load) - 1)


def cv(load: Load) -> Figure:
    """Standard deviation over mean, the coefficient of variation of one layer (camoe Eq. 15)."""
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.divide(load.std(axis=-1, dtype=np.float64), mean, out=np.full(mean.shape, np.nan), where=mean > 0)
