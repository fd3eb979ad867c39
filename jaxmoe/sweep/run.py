"""A sweep from study to results: what is missing is computed, chunk by chunk."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from jaxmoe.config import HardwareConfig, unstated_energy
from jaxmoe.config.keys import is_number
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import Row, is_finite, parts_of, unstated
from jaxmoe.extras import check_parquet
from jaxmoe.registry import METRICS
from jaxmoe.run_folders import locked
from jaxmoe.sweep.analysis import best
from jaxmoe.sweep.chunks import writing
from jaxmoe.sweep.cluster import Cluster, check_address
from jaxmoe.sweep.compile_groups import Group, Refused, groups_of
from jaxmoe.sweep.evaluation import Measured, SweepEvaluator, resources
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.results import Results, row_of, text_columns, with_metrics
from jaxmoe.sweep.study import Study

Progress = Callable[[int, int], None]
"""Called with the points done and those in all."""


@dataclass(frozen=True)
class Sweep:
    """Result of a sweep. `rows` are those of the study's points, in their order; seconds are of this run."""

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


def run_sweep(
    study: Study,
    folder: Path,
    progress: Progress,
    memory_bytes: float = 0.0,
    names: Sequence[str] = (),
    ray: str | None = None,
) -> Sweep:
    """Compute the points of a study that the folder lacks. Raises `InputError`, also where another run writes there.

    `memory_bytes` limits what a chunk takes; 0 is a part of the machine's memory. `names` are metrics that are wanted
    beside the study's own: of all of them, some machine has to state what they need. `ray` is the address of a Ray
    cluster that evaluates chunks, or "local" for one of this machine; without it, this process does.
    """
    check_parquet()
    if ray:
        if study.has_systems:
            raise SweepError(f"--ray evaluates strategies, but {study.path} has systems; leave --ray out")
        check_address(ray)
    with locked(folder):
        return _run(study, folder, progress, memory_bytes, names, ray)


def _run(
    study: Study, folder: Path, progress: Progress, memory_bytes: float, names: Sequence[str], ray: str | None
) -> Sweep:
    start = time.perf_counter()
    space = Space(study)
    points = space.points()
    results = Results(folder, space)
    rows = results.open()
    missing = [point for point in points if point.hash not in rows]
    text = text_columns(points, results.there)
    known = [point for point in points if point.hash in rows]
    wanted = tuple(dict.fromkeys((*study.config.metrics, *names)))
    _check_stated(space, wanted, points)
    done = 0

    def check(*_: int) -> None:
        progress(done, len(missing))

    groups = _Counted(groups_of(space, missing, check, known))
    first = next(groups, None)  # what nothing can be set up of leaves no files
    with writing(folder):
        results.begin(points, text)
    setup_s, start = time.perf_counter() - start, time.perf_counter()
    given = memory_bytes, study.searched
    engine = Cluster(ray, *given, check) if ray and missing else SweepEvaluator(*given)
    with closing(engine):
        for group, part, measured in engine.evaluated(chain([first] if first else [], groups)):
            chunk = results.with_earlier(_chunk(group, part, measured, text))
            with writing(folder):
                results.write(chunk)
            rows |= {row["hash"]: row for row in chunk}
            done += len(chunk)
            check()
    return Sweep(
        space=space,
        points=points,
        rows=[rows[point.hash] for point in points],
        computed=len(missing),
        groups=groups.count,
        compiles=engine.compiles,
        too_large=engine.too_large,
        devices=engine.devices,
        seconds=time.perf_counter() - start,
        setup_s=setup_s,
        notes=_notes(results, points, rows, wanted),
    )


class _Counted(Iterator[Group | Refused]):
    """Groups, and how many have been asked for."""

    def __init__(self, groups: Iterator[Group | Refused]) -> None:
        self.groups, self.count = groups, 0

    def __next__(self) -> Group | Refused:
        group = next(self.groups)
        self.count += 1
        return group


def _chunk(group: Group | Refused, part: slice, measured: Measured | None, text: frozenset[str]) -> list[Row]:
    """Rows of a part of a group."""
    rows = [row_of(point, group, text) for point in group.points[part]]
    if measured is None or isinstance(group, Refused):
        return rows
    busy = resources(group.run)
    return [
        with_metrics(row, metrics, busy[int(busiest)] if busiest >= 0 else (None, None), found)
        for row, metrics, busiest, found in zip(rows, *measured, strict=True)
    ]


def _check_stated(space: Space, wanted: Sequence[str], points: Sequence[Point]) -> None:
    """Raise `InputError` for a metric that is wanted and that no machine of the study states."""
    parts = parts_of(wanted)
    if reason := unstated(wanted, _machines(space, points) if parts else []):
        raise SweepError(f"{space.label}: {reason}")


def _machines(space: Space, points: Sequence[Point]) -> list[HardwareConfig]:
    """One of the machines that differ in numbers alone; none for points that cannot be, whose own notes say why."""
    found: dict[str, HardwareConfig] = {}
    for point in points:
        stated = {key: value for key, value in point.values.items() if key.partition(".")[0] == "hardware"}
        name = repr({key: "a number" if is_number(value) else value for key, value in stated.items()})
        if name not in found:
            with suppress(InputError):
                found[name] = space.scenario(point.values).hardware
    return [*found.values()]


def _notes(results: Results, points: list[Point], known: Mapping[str, Row], wanted: Sequence[str]) -> list[str]:
    """Notes for a reader: files set aside, rows of other versions, points without metrics or not comparable."""
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
    if any(name in METRICS and METRICS[name].part == "energy" for name in wanted):
        notes += _unstated(results.space, points)
    said: dict[str, int] = {}
    for metric in (METRICS[name] for name in wanted if name in METRICS):
        without = sum(is_finite(row["total_s"]) and not is_finite(row[metric.column]) for row in rows)
        if without:
            lacks = f"the machine states no {metric.part}" if metric.part else "the system has no such stage"
            said[f"no {metric.column}, for {lacks}"] = without
    for row in rows:
        if row["note"]:
            said[row["note"]] = said.get(row["note"], 0) + 1
    return notes + [f"{count} {'point' if count == 1 else 'points'}: {note}" for note, count in said.items()]


def _unstated(space: Space, points: Sequence[Point]) -> list[str]:
    """A note on what energies leave out, on any machine."""
    keys = {key for hardware in _machines(space, points) for key in unstated_energy(hardware)}
    return [f"energy counts nothing for what machines do not state: {', '.join(sorted(keys))}"] if keys else []
