"""Computations over rows, in few sizes, so that few functions are compiled: blocks of rows, the last one filled up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.measured_kernels.kinds import Columns, Kind
from jaxmoe.hardware.gpu.kernel import FittedKernel, Terms
from jaxmoe.hardware.gpu.sheet import Sheet

BLOCKS = (1024, 16384)  # rows


def terms_of(kind: Kind, rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    """Terms of rows of one kernel, as NumPy arrays."""

    def computed(at: np.ndarray) -> Terms:
        return kind.terms({name: column[at] for name, column in rows.items()}, sheet, kernel)

    found = _in_blocks(computed, len(next(iter(rows.values()))))
    return Terms(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def seconds_of(fitted: FittedKernel, terms: Terms) -> Float[np.ndarray, " row"]:
    """Seconds of every row."""
    found = _in_blocks(lambda at: (_seconds(fitted, Terms(*(part[at] for part in terms))),), len(terms.memory))
    return np.concatenate([seconds for (seconds,) in found]).astype(float)


_seconds = jax.jit(lambda fitted, terms: fitted.seconds(terms))


def _in_blocks(computed: Callable[[np.ndarray], Sequence[Any]], rows: int) -> list[list[np.ndarray]]:
    """Results of the rows of each block, by their places."""
    block = next((size for size in BLOCKS if rows <= size), BLOCKS[-1])
    found = []
    for start in range(0, rows, block):
        parts = computed(np.minimum(np.arange(start, start + block), rows - 1))
        found.append([np.asarray(part, np.float32)[: rows - start] for part in parts])
    return found
