"""Seconds of the rows of a table by a machine's fitted kernels, each with its interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.grouping import grouped
from jaxmoe.experiment.measured_kernels.padded import seconds_of, terms_of
from jaxmoe.experiment.measured_kernels.tables import PRECISIONS, MeasuredTable
from jaxmoe.hardware.gpu.files import KernelFile, KnownKernel
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES

# Names that another kernel's may differ in where the kernel of a row was not measured, the last most easily.
KEPT = ("op_name", *PRECISIONS, "framework", "kernel_source", "tiles", "version")


@dataclass(frozen=True, eq=False)
class KernelTimes:
    """Seconds of every row, with the bounds of a 90 % interval; and notes on rows that another kernel stands in for."""

    seconds: Float[np.ndarray, " row"]
    lower: Float[np.ndarray, " row"]
    upper: Float[np.ndarray, " row"]
    notes: tuple[str, ...]


def predict(table: MeasuredTable, file: KernelFile) -> KernelTimes:
    """Seconds of all rows of a table.

    Raises `OptionError` where the file has no kernel of the table's kind.
    """
    kind, rows = table.kind, table.columns
    known = file.of_kind(kind.name)
    if not known:
        have = ", ".join(sorted({kernel.kind for kernel in file.kernels}))
        raise OptionError(f"{table.path}: is of kind {kind.name}, for which {file.system} has no kernel; it has {have}")
    seconds, lower, upper = (np.full(len(table), np.nan) for _ in range(3))
    notes = []
    groups, group = grouped(rows, kind.kernel)
    for index, values in enumerate(groups):
        names = dict(zip(kind.kernel, values, strict=True))
        kernel = nearest(names, known)
        if kernel.names != names:
            notes.append(f"{_told(names)}: not measured; {_told(kernel.names)} stands in, its interval may not hold")
        at = np.flatnonzero(group == index)
        some = {name: column[at] for name, column in rows.items()}
        found = seconds_of(kernel.fitted, terms_of(kind, some, file.sheet, names))
        low, high = kernel.interval(np.asarray(some[kind.size], float))
        seconds[at], lower[at], upper[at] = found, found * low, found * high
    return KernelTimes(seconds, lower, upper, tuple(notes))


def nearest(names: Mapping[str, str], known: Sequence[KnownKernel]) -> KnownKernel:
    """The kernel of these names, or else the one that shares most of them, and was measured most."""

    def alike(kernel: KnownKernel) -> tuple[object, ...]:
        shared = (_alike(name, names[name], kernel.names.get(name, "")) for name in KEPT if name in names)
        return (*shared, kernel.names.get("version", ""), kernel.told["rows"])

    return max(known, key=alike)


def _alike(name: str, asked: str, other: str) -> float:
    """1 for the same name, less for another; of precisions, by how much their bytes differ."""
    if name in PRECISIONS and other in WEIGHT_BYTES:
        return float(asked == other) - abs(math.log(WEIGHT_BYTES[asked] / WEIGHT_BYTES[other]))
    return float(asked == other)


def _told(names: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in names.items() if value)
