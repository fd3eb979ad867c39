"""Which measured rows are kept from a fit, stated before it: whole shapes, never single rows of one.

A shape is held out by a hash of its numbers, the same for every system and backend: a quarter of all. A kernel that was
measured at fewer than `FEW` shapes has every fourth size held out instead, which says nothing of other shapes. Fused
MoE kernels have few shapes (models), so that each shape is held out once, in `FOLDS` fits.
"""

import hashlib

import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.experiment.measured_kernels.grouping import grouped
from jaxmoe.experiment.measured_kernels.kinds import Columns, Kind

FOLDS, FEW = 4, 3


def folds_of(kind: Kind, rows: Columns) -> Int[np.ndarray, " row"]:
    """The fold of every row, 0 to `FOLDS` - 1. Rows of one shape share it, where there are shapes enough."""
    shapes, of_row = grouped(rows, kind.shape)
    if (kind.rising and len(shapes) < FEW) or kind.shape == (kind.size,):
        sizes, at = np.unique(rows[kind.size], return_inverse=True)
        return (np.arange(len(sizes)) % FOLDS)[at.ravel()]
    if kind.every_shape:  # few of them: folds of equal numbers of shapes, in the order of the hash
        order = np.argsort(np.argsort([_hash(shape) for shape in shapes]))
        return (order % FOLDS)[of_row]
    return np.array([_hash(shape) % FOLDS for shape in shapes])[of_row]


def tested(kind: Kind) -> tuple[int, ...]:
    """The folds that are held out in turn."""
    return tuple(range(FOLDS)) if kind.every_shape else (FOLDS - 1,)


def by_shape(kind: Kind, rows: Columns) -> bool:
    """Whether whole shapes are held out, so that errors say something of shapes that were not measured."""
    return kind.shape != (kind.size,) and len(grouped(rows, kind.shape)[0]) >= FEW


def _hash(shape: tuple[float | int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(str([int(value) for value in shape]).encode()).digest()[:4], "big")


def series_of(kind: Kind, rows: Columns) -> Int[np.ndarray, " row"]:
    """The series of every row: rows that agree in all inputs but the size."""
    names = [name for name in (*kind.numbers, *kind.texts) if name != kind.size and name != "op_name"]
    return grouped(rows, names)[1]


def repeats(kind: Kind, rows: Columns) -> Bool[np.ndarray, " row"]:
    """Whether a row has the inputs of one before it."""
    _, group = grouped({"series": series_of(kind, rows), "size": rows[kind.size]}, ("series", "size"))
    first = np.unique(group, return_index=True)[1]
    again = np.ones(len(group), bool)
    again[first] = False
    return again
