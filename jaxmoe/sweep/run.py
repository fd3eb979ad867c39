"""A sweep from study to results: what is missing is computed, chunk by chunk."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jaxmoe.sweep.answers import best
from jaxmoe.sweep.evaluation import Engine, resources
from jaxmoe.sweep.groups import Group, groups_of
from jaxmoe.sweep.metrics import Row
from jaxmoe.sweep.points import Point, Space
from jaxmoe.sweep.results import Results, check_installed, row_of, text_columns, with_metrics
from jaxmoe.sweep.study import Study

Progress = Callable[[int, int], None]
"""Called with the points done and those in all."""


@dataclass(frozen=True)
class Sweep:
    """What came out. `rows` are those of the study's points, in their order; seconds are of this run."""

    space: Space
    points: list[Point]
    rows: list[Row]
    computed: int  # points of this run
    groups: int
    compiles: int
    too_large: int  # compilations among them whose chunks would have taken too much memory
    devices: int
    seconds: float  # in which points were evaluated, compilation included
    setup_s: float
    notes: list[str]

    def best(self, name: str) -> Row | None:
        """The best point by a metric among those that can be compared; `None` where there is none."""
        return best(self.rows, name)


def run_sweep(study: Study, folder: Path, progress: Progress, memory_bytes: float = 0.0) -> Sweep:
    """Compute the points of a study that the folder lacks. Raises `InputError`.

    `memory_bytes` limits what a chunk takes; 0 is a part of the machine's memory.
    """
    check_installed()
    start = time.perf_counter()
    space = Space(study)
    points = space.points()
    results = Results(folder, space)
    rows = results.open()
    missing = [point for point in points if point.hash not in rows]
    text = text_columns(points, results.there)
    known = [point for point in points if point.hash in rows]
    groups = groups_of(space, missing, lambda done, total: progress(0, len(missing)), known) if missing else []
    results.begin(points, text)
    setup_s, start, done = time.perf_counter() - start, time.perf_counter(), 0
    engine = Engine(memory_bytes)
    for group in groups:
        for chunk in _chunks(engine, group, text):
            results.write(chunk)
            rows |= {row["hash"]: row for row in chunk}
            done += len(chunk)
            progress(done, len(missing))
    return Sweep(
        space=space,
        points=points,
        rows=[rows[point.hash] for point in points],
        computed=len(missing),
        groups=len(groups),
        compiles=engine.compiles,
        too_large=engine.too_large,
        devices=engine.devices,
        seconds=time.perf_counter() - start,
        setup_s=setup_s,
        notes=_notes(results, [rows[point.hash] for point in points]),
    )


def _chunks(engine: Engine, group: Group, text: frozenset[str]) -> Iterator[list[Row]]:
    """Rows of a group, a chunk at a time."""
    if group.setting is None:
        yield [row_of(point, group, text) for point in group.points]
        return
    busy = resources(group.setting)
    for part, measured in engine.chunks(group):
        yield [
            with_metrics(row_of(point, group, text), metrics, busy[int(busiest)])
            for point, metrics, busiest in zip(group.points[part], *measured, strict=True)
        ]


def _notes(results: Results, rows: list[Row]) -> list[str]:
    """What a reader has to know: files set aside, rows of other versions, points without metrics or not comparable."""
    notes = [
        f"{name} could not be read: it was set aside, and its points were computed anew" for name in results.damaged
    ]
    now = version("jaxmoe")
    older = Counter(row["jaxmoe_version"] for row in rows if row["jaxmoe_version"] != now)
    notes += [
        f"{count} points were computed by jaxmoe {made}, this is {now}: for equal footing give another folder"
        for made, count in older.items()
    ]
    said: dict[str, int] = {}
    for row in rows:
        if row["note"]:
            said[row["note"]] = said.get(row["note"], 0) + 1
    return notes + [f"{count} {'point' if count == 1 else 'points'}: {note}" for note, count in said.items()]
