"""A sweep from study to results: what is missing is computed, chunk by chunk."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jaxmoe.config import unstated_energy
from jaxmoe.errors import InputError
from jaxmoe.sweep.evaluation import Engine, resources
from jaxmoe.sweep.groups import Group, groups_of
from jaxmoe.sweep.metrics import METRICS, Row, is_finite
from jaxmoe.sweep.points import Point, Space, SweepError
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
        metric = METRICS[name]
        able = [row for row in self.rows if row["comparable"] and is_finite(row[metric.column])]
        return (min if metric.lower_is_better else max)(able, key=lambda row: row[metric.column], default=None)


def run_sweep(
    study: Study, folder: Path, progress: Progress, memory_bytes: float = 0.0, names: Sequence[str] = ()
) -> Sweep:
    """Compute the points of a study that the folder lacks. Raises `InputError`.

    `memory_bytes` limits what a chunk takes; 0 is a part of the machine's memory. `names` are metrics that are wanted
    beside the study's own: of all of them, some machine has to state what they need.
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
    wanted = tuple(dict.fromkeys((*study.config.metrics, *names)))
    _check_stated(space, wanted, groups, [rows[point.hash] for point in known])
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
        notes=_notes(results, points, rows, wanted),
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


EXAMPLES = {"energy": "link.energy_pJ_per_B", "area": "die.area_mm2", "price": "die.price"}  # of what to state


def _check_stated(space: Space, wanted: Sequence[str], groups: list[Group], rows: list[Row]) -> None:
    """Raise `SweepError` for a metric that is wanted and that no machine of the study states; `rows` are known ones."""
    machines = [group.setting.inputs.model.machine for group in groups if group.setting is not None]
    for name in wanted:
        metric = METRICS[name]
        known = any(is_finite(row[metric.column]) for row in rows)
        if metric.part is None or known or any(map(metric.is_stated, machines)):
            continue
        raise SweepError(
            f"{space.label}: the metric {name} is wanted, but no machine of the study states any {metric.part}; write "
            f"for example hardware.{EXAMPLES[metric.part]} under set, or leave {name} out"
        )


def _notes(results: Results, points: list[Point], known: Mapping[str, Row], wanted: Sequence[str]) -> list[str]:
    """What a reader has to know: files set aside, rows of other versions, points without metrics or not comparable."""
    rows = [known[point.hash] for point in points]
    notes = [
        f"{name} could not be read: it was set aside, and its points were computed anew" for name in results.damaged
    ]
    now = version("jaxmoe")
    older = Counter(row["jaxmoe_version"] for row in rows if row["jaxmoe_version"] != now)
    notes += [
        f"{count} points were computed by jaxmoe {made}, this is {now}: for equal footing give another folder"
        for made, count in older.items()
    ]
    if any(METRICS[name].part == "energy" for name in wanted):
        notes += _unstated(results.space, points)
    said: dict[str, int] = {}
    for metric in (METRICS[name] for name in wanted):
        without = sum(is_finite(row["total_s"]) and not is_finite(row[metric.column]) for row in rows)
        if without and metric.part is not None:
            said[f"no {metric.column}, for the machine states no {metric.part}"] = without
    for row in rows:
        if row["note"]:
            said[row["note"]] = said.get(row["note"], 0) + 1
    return notes + [f"{count} {'point' if count == 1 else 'points'}: {note}" for note, count in said.items()]


def _unstated(space: Space, points: Sequence[Point]) -> list[str]:
    """A note on what energies leave out, machine by machine as `hardware` names them."""
    keys: set[str] = set()
    for point in {repr(point.values.get("hardware")): point for point in points}.values():
        try:
            keys |= {*unstated_energy(space.scenario(point.values).hardware)}
        except InputError:  # a point that cannot be, whose own note says why
            continue
    return [f"energy counts nothing for what machines do not state: {', '.join(sorted(keys))}"] if keys else []
