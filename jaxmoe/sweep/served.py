"""A sweep over requests and the engines that serve them: what users wait for at every point of a study of `serving`.

Points are served side by side and written a chunk at a time, so that a run that is killed goes on where it was: it
loses a chunk at most. Deployments, their tables of steps and files of requests are read once for all points.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from jaxmoe.config.keys import METHOD, is_of_system
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import Row
from jaxmoe.experiment.serving import COLUMNS, Serving, answers, row_of
from jaxmoe.experiment.serving_inputs import ServingReader
from jaxmoe.extras import check_parquet
from jaxmoe.run_folders import locked
from jaxmoe.sweep.analysis import is_efficient
from jaxmoe.sweep.chunks import ChunkFiles, check_study, version_of, write_study, writing
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.results import cell, text_columns
from jaxmoe.sweep.run import Progress
from jaxmoe.sweep.study import Study
from jaxmoe.threads import streamed

CHUNK = 4  # rows of a file
KIND = "serving"  # in the manifest of a folder
LAYERS_ALONE = ("metrics", "layers", "iterations")  # of a study, which say how layers are timed
KEEPS, USER, DEVICE = "keeps_limits", "tokens_per_s_user", "tokens_per_s_device"
MEASURES = (*COLUMNS, KEEPS, USER, DEVICE)
LEFT_OUT = "left_out"  # the reason, where there are no measures
VERSION = "jaxmoe_version"
Item = TypeVar("Item")


@dataclass(frozen=True)
class ServedSweep:
    """Rows of a study's points, in their order: their values, `MEASURES`, and why one is left out."""

    rows: list[Row]
    computed: int  # points of this run
    setup_s: float  # to read the study and what is there
    seconds: float  # in which points were priced and served
    damaged: list[str]  # files that could not be read and were set aside

    @property
    def served(self) -> list[Row]:
        """Rows with measures."""
        return [row for row in self.rows if row[LEFT_OUT] is None]

    @property
    def front(self) -> list[Row]:
        """Rows that keep their limits and that no other one beats in tokens/s of a user and of a GPU, by the first."""
        rows = sorted((row for row in self.served if row[KEEPS] and row[USER]), key=lambda row: -row[USER])
        if not rows:
            return []
        best = is_efficient(-np.array([[row[USER], row[DEVICE]] for row in rows]))
        return [row for row, is_best in zip(rows, best, strict=True) if is_best]

    @property
    def left_out(self) -> dict[str, int]:
        """How many points are left out, by the reason, the most frequent first."""
        return dict(Counter(row[LEFT_OUT] for row in self.rows if row[LEFT_OUT] is not None).most_common())


class _Task(NamedTuple):
    """A point to serve, or why it cannot be."""

    point: Point
    serving: Serving | str


def sweep_served(study: Study, folder: Path, progress: Progress) -> ServedSweep:
    """Serve the points of a study that the folder lacks.

    Raises `SweepError` where the study asks for layers or the folder is of another one, and where no point can be.
    """
    check_parquet()
    check_serving(study)
    with locked(folder):
        return _sweep(study, folder, progress)


def _sweep(study: Study, folder: Path, progress: Progress) -> ServedSweep:
    start = time.perf_counter()
    space, files = Space(study), ChunkFiles(folder, ("hash", LEFT_OUT, *MEASURES))
    points, identity = space.points(), f"{KIND} {space.identity}"
    check_study(folder, space, identity)
    rows = files.read()
    missing = [point for point in points if point.hash not in rows]
    text = text_columns(points, files.there) | {LEFT_OUT}
    tasks = _tasks(space, missing)
    if not any(row[LEFT_OUT] is None for row in rows.values()):
        tasks = _with_a_sound_one(space, tasks)  # what cannot be leaves no files
    keys = dict.fromkeys(key for point in points for key in _values(point))
    columns = ["hash", "point", *keys, *MEASURES, LEFT_OUT, VERSION]
    with writing(folder):
        files.conform(columns, text)
        write_study(folder, space, identity, MEASURES, kind=KIND)
    setup_s, start = time.perf_counter() - start, time.perf_counter()
    for chunk in written(files, lambda task: _row(task, text), tasks):
        rows |= {row["hash"]: row for row in chunk}
        progress(sum(point.hash in rows for point in missing), len(missing))
    found: list[Row] = [{name: rows[point.hash].get(name) for name in columns} for point in points]
    if all(row[LEFT_OUT] is not None for row in found):
        raise _none_can_be(space, found[0][LEFT_OUT])
    return ServedSweep(found, len(missing), setup_s, time.perf_counter() - start, files.damaged)


def _none_can_be(space: Space, reason: str) -> SweepError:
    return SweepError(f"{space.label}: no point can be served. The first: {reason}")


def written(files: ChunkFiles, row: Callable[[Item], Row], items: Iterable[Item]) -> Iterator[list[Row]]:
    """Rows of all items, made side by side and written a chunk at a time; yields each chunk that is written."""
    rows = streamed(row, items)
    while chunk := [*islice(rows, CHUNK)]:
        with writing(files.folder):
            files.write(chunk)
        yield chunk


def check_serving(study: Study) -> None:
    """Raise `SweepError` for what a study of requests over time has no use for."""
    config, told = study.config, "is given beside axes of serving, which has whole steps of a deployment; drop it"
    given = [key for key in LAYERS_ALONE if key in config.model_fields_set]
    given += [key for key in (*config.axes, *config.set, *config.derived) if key in METHOD or is_of_system(key)]
    if given:
        raise SweepError(f"{study.path}: {given[0]} {told}")


def _tasks(space: Space, points: Sequence[Point]) -> Iterator[_Task]:
    reader = ServingReader()
    for point in points:
        try:
            yield _Task(point, reader(space.scenario(point.values)))
        except InputError as error:
            yield _Task(point, str(error))


def _with_a_sound_one(space: Space, tasks: Iterator[_Task]) -> Iterator[_Task]:
    """The tasks, once one of them can be served. Raises `SweepError` where none can."""
    begun: list[_Task] = []
    for task in tasks:
        begun.append(task)
        if isinstance(task.serving, Serving):
            return chain(begun, tasks)
    if begun:
        raise _none_can_be(space, str(begun[0].serving))
    return iter(())


def _values(point: Point) -> Row:
    return {key: value for key, value in point.values.items() if key not in METHOD}


def _row(task: _Task, text: frozenset[str]) -> Row:
    point, serving = task
    values = {key: cell(value, key in text) for key, value in _values(point).items()}
    row = {"hash": point.hash, "point": point.values_hash, **values, **dict.fromkeys(MEASURES)}
    row |= {LEFT_OUT: serving} if isinstance(serving, str) else {LEFT_OUT: None, **_measures(serving)}
    return row | {VERSION: version_of("jaxmoe")}


def _measures(serving: Serving) -> Row:
    found = row_of(answers(serving, *serving.at()))
    keeps = found["drains"] and found["within_limits"] >= serving.limits.part
    per_token, output = found["per_token_mean_s"], found["output_tokens_per_s"]
    return found | {KEEPS: float(keeps), USER: per_token and 1 / per_token, DEVICE: output / serving.gpus}
