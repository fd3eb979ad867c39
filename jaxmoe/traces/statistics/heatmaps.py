"""Which expert comes with which: heatmaps of counts, one for each layer."""

import numpy as np
from jaxtyping import Float64, Real

Table = Real[np.ndarray, "layer expert expert"]
Heatmap = Float64[np.ndarray, "layer expert expert"]


def conditional(pairs: Table) -> Heatmap:
    """Where one of the events of a row's expert goes to: counts with rows that sum to 1.

    Of token pairs, that one of the next token's choices is j, given a choice of i (wafer-scale study, Fig. 5); of
    layer pairs, the same for the next layer (Fig. 4). The probability that j is among all K choices is K times
    that. Rows without events are 0.
    """
    total = pairs.sum(axis=-1, keepdims=True)
    return np.divide(pairs, total, out=np.zeros(pairs.shape), where=total > 0)


def affinity(together: Table, load: Real[np.ndarray, "layer expert"]) -> Heatmap:
    """The probability that a token chose j, given that it chose i (hd_moe Fig. 3c), from pairs i < j.

    The diagonal, and rows of experts that were never chosen, are 0.
    """
    return np.divide(_both_ways(together), load[..., None], out=np.zeros(together.shape), where=load[..., None] > 0)


def coactivation(together: Table) -> Heatmap:
    """How often i and j were chosen together, over how often by chance (wafer-scale study, Fig. 8a, b).

    A pair's share of all pairs, over 2 / (E (E - 1)), from counts of pairs i < j; symmetric, 0 on the diagonal. A
    layer without pairs is 0.
    """
    experts = together.shape[-1]
    total = together.sum(axis=(1, 2), keepdims=True)
    share = np.divide(_both_ways(together), total, out=np.zeros(together.shape), where=total > 0)
    return share * (experts * (experts - 1) / 2)


def _both_ways(together: Table) -> Table:
    return together + np.swapaxes(together, 1, 2)
