"""Times of the rows of a table by a machine's fitted kernels or exchanges, each with its interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.exchange_fit import MICRO
from jaxmoe.experiment.measured_kernels.exchange_fit import seconds_of as exchange_seconds
from jaxmoe.experiment.measured_kernels.exchange_tables import PARTS, SIDES, ExchangeTable, exchanges_of, load_of
from jaxmoe.experiment.measured_kernels.kinds import grouped
from jaxmoe.experiment.measured_kernels.padded import seconds_of, terms_of
from jaxmoe.experiment.measured_kernels.tables import PRECISIONS, MeasuredTable
from jaxmoe.hardware.gpu.deepep import Load
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, KnownExchange
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


BOUNDS = ("low_", "high_")


def predict_exchanges(table: ExchangeTable, file: ExchangeFile) -> tuple[dict[str, np.ndarray], list[str]]:
    """Predicted columns of a table with their bounds, us, and notes on rows that another version stands in for.

    Raises `OptionError` where the file has nothing measured of the table's kernels, on one node or on several.
    """
    columns = (table.column(side, part) for side in SIDES for part in PARTS[table.mode])
    found = {f"predicted_{bound}{name}": np.zeros(len(table.version)) for name in columns for bound in ("", *BOUNDS)}
    notes: dict[str, None] = {}
    for _, wanted, rows in exchanges_of([table]):
        known = [each for each in file.exchanges if _serves(each, wanted)]
        if not known:
            reach = "several nodes" if wanted["across"] == "nodes" else "one node"
            raise OptionError(
                f"{table.path}: {file.system} has no {wanted['side']} of DeepEP's {table.mode} kernels on {reach}; "
                "remove these rows, or calibrate with a table of them"
            )
        best = max(known, key=lambda each: (each.names["version"] == wanted["version"], each.told["rows"]))
        if best.names["version"] != wanted["version"]:
            notes[f"version {wanted['version']}: not measured; {best.names['version']} stands in"] = None
        load = Load(*(part[rows] for part in load_of(table, wanted["side"], file.processors, file.node)))
        seconds = exchange_seconds(best.kernel, load, file.links) / MICRO
        name = table.column(wanted["side"], wanted["part"])
        found[f"predicted_{name}"][rows] = seconds
        for bound, factor in zip(BOUNDS, best.interval, strict=True):
            found[f"predicted_{bound}{name}"][rows] = seconds * factor
    return found, list(notes)


def _serves(known: KnownExchange, wanted: Mapping[str, str]) -> bool:
    """Whether an exchange tells these rows. A low-latency kernel of several nodes is that of one, too."""
    reach = (wanted["across"], "nodes") if wanted["part"] == "avg_t" else (wanted["across"],)
    same = all(known.names[key] == wanted[key] for key in ("side", "part"))
    return same and known.names["across"] in reach
