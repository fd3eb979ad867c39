"""Rows of tables by the values of some columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


def grouped(
    columns: Mapping[str, np.ndarray], names: Sequence[str]
) -> tuple[list[tuple[Any, ...]], Int[np.ndarray, " row"]]:
    """Values of each group in the order of `names`, sorted, and the group of every row."""
    parts = [np.unique(columns[name], return_inverse=True) for name in names]
    code = np.zeros(len(columns[names[0]]), np.int64)
    for values, at in parts:
        code = code * len(values) + at.ravel()
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    return [tuple(columns[name][row].item() for name in names) for row in first], group.ravel()
