"""Further output of `jaxmoe sweep`: bottlenecks of points, effects of axes, and a map of the best strategies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.config.keys import is_number
from jaxmoe.experiment.limits import resource_name
from jaxmoe.report import plot_wins
from jaxmoe.sweep.analysis import Winner
from jaxmoe.sweep.effects import Effects, effects
from jaxmoe.sweep.points import SweepError
from jaxmoe.sweep.run import Sweep
from jaxmoe.sweep.study import RangeConfig, Study, axis_of

WORTH_A_ROW = 0.01  # of the variance, for two axes together


def print_limits(limits: dict[str, dict[str, int]]) -> None:
    """At how many points of each strategy a link, a port, compute or a memory level is busy longest."""
    kinds = sorted({kind for counts in limits.values() for kind in counts})
    table = new_table("points by what is busy longest", "strategy", map(resource_name, kinds))
    for name, counts in limits.items():
        table.add_row(escape(name), *(str(counts.get(kind, 0)) for kind in kinds))
    print_table(table)


def tell_effects(study: Study, sweep: Sweep) -> dict[str, Any]:
    """Print the effects of axes on the study's metrics, and return them for the summary.

    A metric whose effects cannot be computed is left out, with a warning.
    """
    found: list[Effects] = []
    for name in study.config.metrics:
        try:
            found.append(effects(sweep.space, sweep.points, sweep.rows, name))
        except SweepError as error:
            print_warnings([f"no effects: {error}"])
    if found:
        _print_effects(found)
    return {each.metric: _for_programs(each) for each in found}


def _for_programs(told: Effects) -> dict[str, Any]:
    """Shares of variance; null where there are too few points to tell."""
    pairs = [(a, b) for a in range(len(told.axes)) for b in range(a)]
    return {
        "logarithm": told.logarithm,
        "points": told.points,
        "main": dict(zip(told.axes, told.main.tolist(), strict=True)),
        "total": dict(zip(told.axes, told.total.tolist(), strict=True)),
        "pairs": [{"axes": [told.axes[b], told.axes[a]], "share": float(told.pairs[a, b])} for a, b in pairs],
        "rest": told.rest,
    }


def _print_effects(found: Sequence[Effects]) -> None:
    table = new_table(
        "% of a metric's variance (of its logarithm, where above 0) that axes explain",
        "axes",
        (told.metric for told in found),
    )
    axes = list(dict.fromkeys(axis for told in found for axis in told.axes))
    for axis in axes:
        table.add_row(escape(label_of(axis)), *(_percent(_main(told, axis)) for told in found))
    for at, axis in enumerate(axes):
        for other in axes[:at]:
            together = [_pair(told, other, axis) for told in found]
            if any(share >= WORTH_A_ROW for share in together):
                table.add_row(escape(f"{label_of(other)} with {label_of(axis)}"), *map(_percent, together))
    table.add_row("all the rest", *(_percent(told.rest) for told in found))
    print_table(table)


def _main(told: Effects, axis: str) -> float:
    return float(told.main[told.axes.index(axis)]) if axis in told.axes else np.nan


def _pair(told: Effects, one: str, other: str) -> float:
    if one not in told.axes or other not in told.axes:
        return np.nan
    return float(told.pairs[told.axes.index(one), told.axes.index(other)])


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


# Map of the best strategies.


def map_axes(study: Study, text: str) -> tuple[str, str]:
    """The two axes of `--map X,Y`, each by its key or the end of one. Raises `SweepError`."""
    numeric = [key for key, value in study.config.axes.items() if _is_numeric(value)]
    chosen = []
    for name in (part.strip() for part in text.split(",")):
        meant = [key for key in numeric if key == name] or [key for key in numeric if key.endswith(f".{name}")]
        chosen += meant if len(meant) == 1 else []
    if len(chosen) != 2 or len(set(chosen)) != 2 or text.count(",") != 1:
        known = ", ".join(numeric) or "none here; give an axis numbers"
        raise SweepError(f"--map is {text!r}; expected two axes of numbers, separated by a comma: {known}")
    return chosen[0], chosen[1]


def _is_numeric(axis: dict | list) -> bool:
    return isinstance(axis, dict) or all(map(is_number, axis))


def draw_map(study: Study, axes: tuple[str, str], won: Sequence[Winner], path: Path) -> None:
    """Write the map of winners by the first metric, or say why there is none: the rest of the sweep is sound."""
    if not won:
        path.unlink(missing_ok=True)  # of an earlier run
        print_warnings([f"no map: no points have {study.config.metrics[0]} and can be compared"])
        return
    x, y = (np.array([winner.row[key] for winner in won], float) for key in axes)
    others = [key for key in study.config.axes if key not in (*axes, "strategy", "exchange")]
    beside = f", over {len(others)} further {'axis' if len(others) == 1 else 'axes'}" if others else ""
    plot_wins(
        path,
        x,
        y,
        [winner.row["strategy"] for winner in won],
        np.array([winner.behind for winner in won]),
        (label_of(axes[0]), label_of(axes[1])),
        (_is_logarithmic(study, axes[0], x), _is_logarithmic(study, axes[1], y)),
        f"{study.config.name}: best strategy by {study.config.metrics[0]}{beside}",
    )


def _is_logarithmic(study: Study, key: str, values: np.ndarray) -> bool:
    """A range says so; a list is where its last step is more than twice its first."""
    axis = axis_of(study.config.axes[key], ("axes", key))
    if isinstance(axis, RangeConfig):
        return axis.scale == "log"
    steps = np.diff(np.unique(values))
    return bool(len(steps) > 1 and values.min() > 0 and steps[-1] > 2 * steps[0])


MICRO = {"us": "µs"}  # keys are of ASCII letters
UNITS = ("ns", "us", "ms", "s", "B", "kB", "MB", "GB", "W", "mm2")


def label_of(key: str) -> str:
    """For people, with the unit at the end of a key: link bandwidth [GB/s]."""
    name = " ".join(key.split(".")[-2:]) if "." in key else key
    quantity, per, below = name.partition("_per_")
    if per and below in UNITS:
        above, unit = quantity.rpartition("_")[::2]
        return f"{above.replace('_', ' ')} [{unit.replace('FLOPs', 'FLOP')}/{MICRO.get(below, below)}]"
    above, unit = name.rpartition("_")[::2]
    return f"{above.replace('_', ' ')} [{MICRO.get(unit, unit)}]" if unit in UNITS else name.replace("_", " ")
