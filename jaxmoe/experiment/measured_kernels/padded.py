"""Computations over rows, in few sizes: rows are repeated up to the next, so that few functions are compiled."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.measured_kernels.kinds import Columns, Kind
from jaxmoe.hardware.gpu.kernel import FittedKernel, Terms
from jaxmoe.hardware.gpu.sheet import Sheet


def padded_size(rows: int, least: int = 1024, factor: int = 4) -> int:
    """The size that so many rows are computed in."""
    while least < rows:
        least *= factor
    return least


def terms_of(kind: Kind, rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    """Terms of rows of one kernel, as NumPy arrays."""
    count = len(next(iter(rows.values())))
    at = _up_to(count)
    found = kind.terms({name: column[at] for name, column in rows.items()}, sheet, kernel)
    return Terms(*(np.asarray(part, np.float32)[:count] for part in found))


def seconds_of(fitted: FittedKernel, terms: Terms) -> Float[np.ndarray, " row"]:
    """Seconds of every row."""
    count = len(terms.memory)
    at = _up_to(count)
    return np.asarray(_seconds(fitted, Terms(*(part[at] for part in terms))), float)[:count]


_seconds = jax.jit(lambda fitted, terms: fitted.seconds(terms))


def _up_to(count: int) -> np.ndarray:
    return np.minimum(np.arange(padded_size(count)), count - 1)
