"""Data for the page of a sweep: all points or, of many, a seeded sample and every point of the Pareto fronts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.experiment.limits import resource_name
from jaxmoe.experiment.metrics import column_of, is_finite
from jaxmoe.report.html import SweepData
from jaxmoe.sweep.analysis import Winner, best, limits
from jaxmoe.sweep.folder import SweepFolder

DRAWN = 1500  # points, and cases: parallel coordinates of more take seconds where no GPU draws them
MOST_METRICS = 4
SEED = 0


def sweep_data(folder: SweepFolder, summary: Mapping[str, Any]) -> SweepData:
    """Rows to draw, fronts, winners and elasticities. The study's own metrics come first."""
    named = [name for name in summary.get("study", {}).get("metrics", []) if name in folder.metrics]
    metrics = list(dict.fromkeys([*named, *folder.metrics]))
    planes = metrics[: max(2, min(len(named), MOST_METRICS))]
    able = folder.able(planes)
    fronts = folder.fronts(planes) if able else {}
    at = _drawn(folder, able, {key for hashes in fronts.values() for key in hashes})
    index = {folder.rows[row]["hash"]: place for place, row in enumerate(at)}
    won = folder.winners(metrics[0])
    shown = _sample(len(won), DRAWN)
    return SweepData(
        rows=[folder.rows[row] for row in at],
        points=len(folder.rows),
        able=len(able),
        axes=folder.axes,
        metrics={name: column_of(name) for name in metrics},
        fronts={pair: [index[key] for key in hashes] for pair, hashes in fronts.items()},
        best={name: row for name in planes if (row := best(folder.rows, name)) is not None},
        winners=[won[case].row for case in shown],
        behind=[won[case].behind for case in shown],
        wins=_wins(won) if "strategy" in folder.axes else {},
        worth=folder.elasticities(),
        limits={
            name: {resource_name(kind): count for kind, count in counts.items()}
            for name, counts in limits(folder.rows).items()
        },
        notes=_notes(folder, summary),
    )


def _drawn(folder: SweepFolder, able: Sequence[int], on_fronts: set[str]) -> list[int]:
    """Rows that can be drawn; of many a sample, and all that are on a front. In their order."""
    sampled = {able[index] for index in _sample(len(able), DRAWN)}
    return [row for row in able if row in sampled or folder.rows[row]["hash"] in on_fronts]


def _sample(count: int, most: int) -> list[int]:
    """Numbers below `count`: all, or so many drawn with a fixed seed, in their order."""
    if count <= most:
        return list(range(count))
    return np.sort(np.random.default_rng(SEED).choice(count, most, replace=False)).tolist()


def _wins(won: Sequence[Winner]) -> dict[str, tuple[int, float | None]]:
    """Cases by strategy, and how far the next strategy is behind in the median."""
    behind: dict[str, list[float]] = {}
    for winner in won:
        behind.setdefault(winner.row["strategy"], []).append(winner.behind)
    wins: dict[str, tuple[int, float | None]] = {}
    for name, values in behind.items():
        finite = [each for each in values if is_finite(each)]
        wins[name] = (len(values), float(np.median(finite)) if finite else None)
    return wins


def _notes(folder: SweepFolder, summary: Mapping[str, Any]) -> list[str]:
    """Notes of the sweep itself, and a warning where the folder has fewer or more points than the study."""
    notes = [str(note) for note in summary.get("notes", [])]
    if not summary:
        notes.append("The sweep was stopped before it was done; the page shows the points that it has.")
    elif len(folder.rows) > summary.get("points", len(folder.rows)):
        notes.append(
            f"The folder has {len(folder.rows) - summary['points']:,} points of earlier forms of the study, which are "
            "shown as well."
        )
    return notes
