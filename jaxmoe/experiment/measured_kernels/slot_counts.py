"""How many tokens each slot of the timed rank had, where experts were put in slots by EPLB, with copies.

The collector draws a power law, gives EPLB the loads of its experts, and times the rank that then has the most to do.
A copy of an expert has an equal part of its tokens.
"""

from functools import cache

import numpy as np

from jaxmoe.experiment.measured_kernels.token_counts import loads_of, mean_loads, power_law_draws
from jaxmoe.hardware.gpu.terms import ExpertLoads
from jaxmoe.placement.eplb import eplb

BALANCED = "_eplb"  # at the end of a distribution's name


@cache
def slot_loads(tokens: int, experts: int, top_k: int, ranks: int, slots: int, distribution: str) -> ExpertLoads:
    """Loads of the timed rank, for `power_law_ALPHA` without EPLB or `power_law_ALPHA_eplb` with it.

    Raises `ValueError` for another distribution.
    """
    if not distribution.endswith(BALANCED):
        return loads_of(tokens, experts, top_k, ranks, distribution)
    drawn = power_law_draws(tokens, experts, top_k, ranks, distribution.removesuffix(BALANCED))
    held = eplb(drawn.astype(float), slots, ranks)
    copies = np.stack([np.bincount(row, minlength=experts) for row in held])
    each = np.take_along_axis(drawn / copies, held, axis=1).reshape(len(drawn), ranks, -1)
    most = each.sum(axis=2).argmax(axis=1)
    fullest = each[np.arange(len(each)), most]
    counts = np.floor(np.cumsum(fullest, axis=1) + 0.5)  # whole tokens, none lost
    return mean_loads(np.diff(counts, axis=1, prepend=0).astype(np.int64), float(tokens))
