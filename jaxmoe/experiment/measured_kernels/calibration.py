"""Kernels fitted to tables, each with its held-out errors, its intervals, and what is odd in its rows."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import norm as normal
from scipy.stats import t as student

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.fit import Recipe, fit
from jaxmoe.experiment.measured_kernels.kinds import KINDS, Columns, Kind, grouped
from jaxmoe.experiment.measured_kernels.padded import seconds_of, terms_of
from jaxmoe.experiment.measured_kernels.tables import MeasuredTable
from jaxmoe.experiment.stage_timer import Report
from jaxmoe.hardware.gpu.files import KernelFile, KnownKernel
from jaxmoe.hardware.gpu.kernel import FittedKernel, Terms
from jaxmoe.hardware.gpu.sheet import Sheet, sheet_of

SLOW = 1.9  # times the model, above which the median of a series is flagged
LEAST_RATIO, MOST_RATIO = 0.2, 300.0  # of measured over roofline where there is most work: beyond, the unit is another
BINNED = 200  # held-out rows of a decade of sizes that have an interval of their own
WIDE = (0.0, 0.5, 2.0)  # the interval of a kernel of which nothing was held out
SOURCE = "measured tables of ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0)"
OUTSIDE = 0.05  # part of the rows on each side of an interval


@dataclass(frozen=True, eq=False)
class KernelFit:
    """A fitted kernel. Arrays are of its rows: seconds `measured`, by the data sheet's `roofline`, and `held_out` ones.

    `held_out` is not a number where a row was in no fold that was held out, `base` the same by the base alone. `floor`
    interpolates the neighbours of a row in its series. `slow` flags rows of slow series.
    """

    kind: Kind
    kernel: Mapping[str, str]
    rows: Columns
    fitted: FittedKernel
    measured: Float[np.ndarray, " row"]
    roofline: Float[np.ndarray, " row"]
    held_out: Float[np.ndarray, " row"]
    base: Float[np.ndarray, " row"]
    floor: Float[np.ndarray, " row"]
    slow: Bool[np.ndarray, " row"]
    repeated: Bool[np.ndarray, " row"]
    of_shapes: bool
    intervals: tuple[tuple[float, float, float], ...] = field(default=())

    @property
    def size(self) -> Float[np.ndarray, " row"]:
        """The size that a series runs over."""
        return np.asarray(self.rows[self.kind.size], float)


def pooled(tables: Iterable[MeasuredTable]) -> Iterator[tuple[Kind, Mapping[str, str], Columns]]:
    """Rows of every kernel, of whichever tables."""
    found: dict[tuple[str, ...], list[Columns]] = {}
    for table in tables:
        names = table.kind.kernel
        groups, group = grouped(table.columns, names)
        for index, values in enumerate(groups):
            at = np.flatnonzero(group == index)
            wanted = {*table.kind.numbers, *table.kind.texts, table.kind.latency}
            some = {name: table.columns[name][at] for name in wanted}
            found.setdefault((table.kind.name, *values), []).append(some)
    for key, parts in sorted(found.items()):
        kind = KINDS[key[0]]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        yield kind, dict(zip(kind.kernel, key[1:], strict=True)), joined


def calibrated(
    kind: Kind, kernel: Mapping[str, str], rows: Columns, sheet: Sheet, recipe: Recipe, seed: int
) -> KernelFit:
    """Fit one kernel, by folds for its errors and then to all rows.

    Raises `OptionError` where its times are in another unit.
    """
    terms = terms_of(kind, rows, sheet, kernel)
    measured = np.asarray(rows[kind.latency], float) * kind.unit
    check_unit(kind, kernel, terms, measured)
    folds, shape = folds_of(kind, rows), grouped(rows, kind.shape)[1]

    def fitted_to(some: Bool[np.ndarray, " row"]) -> tuple[FittedKernel, FittedKernel]:
        return fit(_of(terms, some), measured[some], len(np.unique(shape[some])), recipe, seed)

    held = {name: np.full(len(measured), np.nan) for name in ("base", "whole")}
    for fold in tested(kind):
        kept, left = folds != fold, folds == fold
        if not (kept.any() and left.any()):
            continue
        for name, found in zip(held, fitted_to(kept), strict=True):
            held[name][left] = seconds_of(found, _of(terms, left))
    better = not _error(held["whole"], measured) > _error(held["base"], measured)
    alone, whole = fitted_to(np.ones(len(measured), bool))
    fitted, told = (whole, held["whole"]) if better else (alone, held["base"])
    return judged(kind, kernel, rows, terms, fitted, told, held["base"])


def judged(
    kind: Kind,
    kernel: Mapping[str, str],
    rows: Columns,
    terms: Terms,
    fitted: FittedKernel,
    told: Float[np.ndarray, " row"],
    base: Float[np.ndarray, " row"],
) -> KernelFit:
    """A fitted kernel with what its rows tell of it. `told` and `base` are no numbers where it was fitted to a row."""
    measured, size = np.asarray(rows[kind.latency], float) * kind.unit, np.asarray(rows[kind.size], float)
    usual = np.where(np.isnan(told), seconds_of(fitted, terms), told)
    series = series_of(kind, rows)
    slow = _slow(series, measured / usual)
    return KernelFit(
        kind,
        kernel,
        rows,
        fitted,
        measured,
        _roofline(terms),
        told,
        base,
        _floor(series, size, measured),
        slow,
        repeats(kind, rows),
        by_shape(kind, rows),
        intervals_of(size[~slow], (measured / told)[~slow], grouped(rows, kind.shape)[1][~slow]),
    )


def _roofline(terms: Terms) -> Float[np.ndarray, " row"]:
    return np.maximum(terms.memory.sum(-1), terms.tiles.min(-1)).astype(float)


def intervals_of(
    size: Float[np.ndarray, " row"], ratio: Float[np.ndarray, " row"], shape: Int[np.ndarray, " row"]
) -> tuple[tuple[float, float, float], ...]:
    """Quantiles of measured over told seconds by decade of size: from which size on, lower, upper.

    Rows of one `shape` are off together: from few shapes, bounds are further from the middle, as Student's t is of a
    next draw.
    """
    known = np.isfinite(ratio)
    size, ratio = size[known], ratio[known]
    if not len(ratio):
        return ()
    spread = _spread_of(len(np.unique(shape[known])))

    def bounds(inside: np.ndarray) -> np.ndarray:
        low, middle, high = np.quantile(np.log(inside), (OUTSIDE, 0.5, 1 - OUTSIDE))
        return np.exp(middle + spread * np.array([low - middle, high - middle]))

    decade = decades(size)
    found = [(0.0, *bounds(ratio))]
    for each in np.unique(decade):
        inside = ratio[decade == each]
        if len(inside) >= BINNED:
            found.append((float(10.0**each), *bounds(inside)))
    return tuple((float(start), float(low), float(high)) for start, low, high in found)


def _spread_of(draws: int) -> float:
    """How many times as wide as of a normal distribution an interval of the next draw is, from so many."""
    freedom = max(draws - 1, 1)
    return float(student.ppf(1 - OUTSIDE, freedom) / normal.ppf(1 - OUTSIDE) * np.sqrt(1 + 1 / draws))


def decades(size: Float[np.ndarray, " row"]) -> Int[np.ndarray, " row"]:
    """Powers of ten of sizes."""
    return np.floor(np.log10(np.maximum(size, 1)) + 1e-9).astype(int)


def _of(terms: Terms, rows: Bool[np.ndarray, " row"]) -> Terms:
    return Terms(*(part[rows] for part in terms))


def _error(told: np.ndarray, measured: np.ndarray) -> float:
    """Mean relative error of rows that are told, whose outliers count as 1."""
    known = np.isfinite(told)
    return float(np.minimum(np.abs(told[known] / measured[known] - 1), 1).mean()) if known.any() else np.inf


def check_unit(kind: Kind, kernel: Mapping[str, str], terms: Terms, measured: Float[np.ndarray, " row"]) -> None:
    """Raise `OptionError` where the rows with the most work take a time that no GPU takes."""
    roofline = _roofline(terms)
    most = roofline >= np.quantile(roofline, 0.9)
    ratio = float(np.median(measured[most] / roofline[most]))
    if not LEAST_RATIO < ratio < MOST_RATIO:
        raise OptionError(
            f"{kind.name} of {', '.join(filter(None, kernel.values()))}: the rows with the most work take {ratio:.3g} "
            f"times as long as the data sheet says; {kind.latency} has to be in ms"
        )


def _slow(series: Int[np.ndarray, " row"], ratio: Float[np.ndarray, " row"]) -> Bool[np.ndarray, " row"]:
    """Whether the median of a row's series is above `SLOW`."""
    order = np.argsort(series, kind="stable")
    parts = np.split(ratio[order], np.flatnonzero(np.diff(series[order])) + 1)
    return np.array([np.median(part) > SLOW for part in parts])[series]


def _floor(
    series: Int[np.ndarray, " row"], size: Float[np.ndarray, " row"], measured: Float[np.ndarray, " row"]
) -> Float[np.ndarray, " row"]:
    """Seconds between the neighbours of each row in its series, by logarithms; not a number at the ends."""
    order = np.lexsort((size, series))
    told = np.full(len(size), np.nan)
    before, at, after = order[:-2], order[1:-1], order[2:]
    inside = (series[before] == series[at]) & (series[at] == series[after]) & (size[before] < size[at])
    inside &= size[at] < size[after]
    before, at, after = before[inside], at[inside], after[inside]
    x, low, high = (np.log(np.maximum(size[some], 0.5)) for some in (at, before, after))
    part = (x - low) / (high - low)
    told[at] = np.exp((1 - part) * np.log(measured[before]) + part * np.log(measured[after]))
    return told


RECIPES: dict[str, Recipe] = {
    "gemm": Recipe(3500, 32, 1e-5, 1e-6),
    "moe": Recipe(1000, 16, 1e-3, 1e-4),
    "wideep_moe": Recipe(1000, 16, 1e-3, 1e-4),
    "attention_context": Recipe(2500, 24, 1e-4, 1e-5),
    "attention_generation": Recipe(2500, 24, 1e-4, 1e-5),
    "mla_context": Recipe(1500, 16, 1e-4, 1e-5),
    "mla_generation": Recipe(1500, 16, 1e-4, 1e-5),
    "mla_context_module": Recipe(1500, 16, 1e-4, 1e-5),
    "mla_generation_module": Recipe(1500, 16, 1e-4, 1e-5),
    "nccl": Recipe(1500, 16, 1e-3, 1e-4),
    "all_reduce": Recipe(1500, 16, 1e-3, 1e-4),
    "alltoall": Recipe(1500, 16, 1e-3, 1e-4),
}


def calibrate_tables(tables: Sequence[MeasuredTable], sheet: Sheet, seed: int, report: Report) -> list[KernelFit]:
    """Every kernel of these tables, fitted."""
    found, groups = [], list(pooled(tables))
    for done, (kind, kernel, rows) in enumerate(groups):
        report("kernels", done, len(groups))
        found.append(calibrated(kind, kernel, rows, sheet, RECIPES[kind.name], seed))
    return found


def kernel_file(
    system: str, fits: Sequence[KernelFit], kept: Sequence[KnownKernel] = (), like: str | None = None
) -> KernelFile:
    """The file of a machine's fits: numbers, intervals, where they come from; with kernels that were fitted before.

    `like` names the file of another GPU, whose kernels stand in for kinds that were not measured.
    """
    kernels = sorted((*map(_known, fits), *kept), key=lambda kernel: kernel.kind)
    rows = sum(kernel.told["rows"] for kernel in kernels)
    return KernelFile(system, f"{SOURCE}: {system}, {rows} rows", sheet_of(system), tuple(kernels), like)


def _known(fit: KernelFit) -> KnownKernel:
    off = np.abs(fit.held_out / fit.measured - 1)
    error = float(f"{np.nanmean(off):.3g}") if np.isfinite(off).any() else None
    told = {"rows": len(fit.measured), "held_out_error": error, "of_shapes": fit.of_shapes}
    return KnownKernel(fit.kind.name, dict(fit.kernel), fit.fitted, fit.intervals or (WIDE,), told)


# Rows that are kept from a fit, stated before it: whole shapes, never single rows of one.
#
# A shape is held out by a hash of its numbers, the same for every system and backend: a quarter of all. A kernel that
# was measured at fewer than `FEW` shapes has every fourth size held out instead, which says nothing of other shapes.
# Fused MoE kernels have few shapes (models), so that each shape is held out once, in `FOLDS` fits.

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
