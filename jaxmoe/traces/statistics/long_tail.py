"""The long tail: few experts with many tokens, many experts with few (expert streaming, Fig. 2b, c)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jaxmoe.traces.statistics.drawn import drawn_loads
from jaxmoe.traces.trace import GatingTrace

BATCH_TOKENS = (16, 32, 64, 128, 256, 512)


def long_tail(
    trace: GatingTrace, sizes: Sequence[int] = BATCH_TOKENS, batches: int = 64, seed: int = 0
) -> Int32[np.ndarray, "size batch layer rank"]:
    """Tokens of the busiest expert, the next, and so on, in drawn batches of each size.

    `sizes` are tokens in a batch, ascending. Experts are sorted anew in every batch. Raises `TraceError` when the
    trace has fewer tokens than a batch. The same seed gives the same batches.
    """
    runs = [-np.sort(-loads, axis=-1) for loads in drawn_loads(trace, sizes, batches, seed)]
    return np.swapaxes(np.concatenate(runs), 0, 1)
