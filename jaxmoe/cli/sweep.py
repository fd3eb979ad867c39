"""`jaxmoe sweep`: all points of a study, and what they tell."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxmoe.cli import sweep_deployments, sweep_served
from jaxmoe.cli.comparison_output import NONE, as_factor, new_table, print_table, print_warnings
from jaxmoe.cli.progress import bars_of
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.cli.sweep_answers import draw_map, label_of, map_axes, print_limits, tell_effects
from jaxmoe.cli.sweep_tables import point_rows, print_best, print_front
from jaxmoe.config import Scenario, element_bytes
from jaxmoe.errors import InputError
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import write_table
from jaxmoe.registry import METRICS
from jaxmoe.report.style import aligned, time_unit
from jaxmoe.sweep.analysis import Elasticities, Winner, check_metrics, check_searched, limits, winners
from jaxmoe.sweep.analysis import elasticities as worth
from jaxmoe.sweep.analysis import pareto as front
from jaxmoe.sweep.chunks import MANIFEST, POINTS, STUDY, writing
from jaxmoe.sweep.explanation import Explanation, explained, find_point
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.results import ELASTICITIES, Results
from jaxmoe.sweep.run import Progress as Report
from jaxmoe.sweep.run import Sweep, run_sweep
from jaxmoe.sweep.study import Study, read_study
from jaxmoe.units import GIGA

MAP, TABLE = "map.png", "points.csv"
MOST_IN_TABLE = 100_000  # points: no spreadsheet opens more, and the files under points/ have all


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    explain: str | None,
    pareto: str | None,
    elasticities: bool,
    effects: bool,
    wins_map: str | None,
    memory: float | None,
    ray: str | None,
) -> None:
    """Compute the points that the folder lacks, and tell what came out. Or explain a single point."""
    study = read_study(config)
    if study.has_serving or study.has_deployments:
        _check_options(
            study,
            {"--explain": explain, "--pareto": pareto, "--elasticities": elasticities, "--effects": effects}
            | {"--map": wins_map, "--memory": memory, "--ray": ray},
        )
        of_points = sweep_served if study.has_serving else sweep_deployments
        of_points.run(folder, study, partial(_bar, interrupts))
        return
    if explain is not None:
        space = Space(study)
        told = explained(space, find_point(space.points(), explain))
        folder.write_json(f"explain-{told.point.hash}.json", _explanation(told))
        _print_explanation(told)
        return
    names = [name.strip() for name in pareto.split(",")] if pareto else []
    if names:
        check_metrics(names)
        check_searched(study, names)
    axes = map_axes(study, wins_map) if wins_map else None
    for name in (POINTS, MANIFEST, STUDY, *([MAP] if axes else [])):
        folder.target(name)
    folder.to_go_on = "run again to go on"
    with _bar(interrupts) as report:
        sweep = run_sweep(study, folder.path, report, (memory or 0.0) * GIGA, names, ray)
    (folder.path / ELASTICITIES).unlink(missing_ok=True)  # of an earlier run, whose points were others
    answers = _elasticities(sweep, folder, interrupts) if elasticities else None
    _tell(study, sweep, folder, names, effects, axes)
    if answers is not None:
        _print_worth(study, answers)


def _check_options(study: Study, refused: dict[str, Any]) -> None:
    """Raise `SweepError` for an option that only a sweep of layers has."""
    given = [name for name, value in refused.items() if value]
    if given:
        told = "requests over time" if study.has_serving else "deployments"
        instead = {"--elasticities": ", or ask `jaxmoe evaluate --phase decode --elasticities` of a point"}
        remedy = f"drop it{instead.get(given[0], '')}"
        raise SweepError(f"{given[0]} is given, but {study.path} has axes of {told}, which have none; {remedy}")


def _tell(
    study: Study, sweep: Sweep, folder: OutputFolder, names: list[str], effects: bool, axes: tuple[str, str] | None
) -> None:
    """Write and print what came out; `names` are metrics of a Pareto front, `axes` those of a map of winners."""
    best, chosen = winners(sweep.points, sweep.rows, study.config.metrics[0]), front(sweep.rows, names) if names else []
    print_best(study, sweep, _bytes(study, sweep.points))
    if best and len({row["strategy"] for row in sweep.rows}) > 1:
        _print_wins(study, _wins(best), len(best))
    if names:
        print_front(study, chosen, names)
    print_limits(limits(sweep.rows))
    summary = _summary(study, sweep) | {"wins": _wins(best), "pareto": chosen, "limits": limits(sweep.rows)}
    summary |= {"effects": tell_effects(study, sweep)} if effects else {}
    print_warnings(sweep.notes)
    listed = len(sweep.points) <= MOST_IN_TABLE
    with writing(folder.path):
        if listed:
            folder.target(TABLE)
        folder.write_json("summary.json", _finite(summary))
        for name in (MAP, f"{Path(MAP).stem}.pdf", TABLE):  # of an earlier run, whose points were others
            (folder.path / name).unlink(missing_ok=True)
        if listed:
            write_table(folder.path / TABLE, point_rows(study, sweep), digits=6)
        if axes:
            draw_map(study, axes, best, folder.path / MAP)


def _elasticities(sweep: Sweep, folder: OutputFolder, interrupts: Interrupts) -> list[Elasticities] | None:
    """Write elasticities, or say why there are none: the rest of the sweep is sound without them."""
    try:
        with _bar(interrupts, "slopes of points") as report:
            answers = worth(sweep.space, sweep.points, report)
    except SweepError as error:
        print_warnings([f"no elasticities: {error}"])
        return None
    folder.target(ELASTICITIES)
    with writing(folder.path):
        Results(folder.path, sweep.space).write_elasticities(answers)
    return answers


@contextmanager
def _bar(interrupts: Interrupts, what: str = "points") -> Iterator[Report]:
    """How many of `what` are done, their rate and the time left, on a terminal; every report checks for Ctrl-C."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with bars_of(columns) as (bars, at):
        task = bars.add_task(what, total=None, rate="")

        def report(done: int, total: int) -> None:
            interrupts.check()
            at(what, done, total)
            speed = bars.tasks[0].speed
            bars.update(task, completed=done, total=total, rate="" if not speed else f"{speed:.0f} points/s")

        yield report


def _bytes(study: Study, points: Sequence[Point]) -> str:
    """Bytes of an element where all points have the same."""
    space, of_model = Space(study), {str(point.values.get("model")): point for point in points}
    if any(key.startswith(("costs.", "model.bytes")) for key in points[0].values):
        return "bytes by point"
    told = {element_bytes(scenario).told() for point in of_model.values() if (scenario := _scenario(space, point))}
    return told.pop() if len(told) == 1 else "bytes by point"


def _scenario(space: Space, point: Point) -> Scenario | None:
    try:
        return space.scenario(point.values)
    except InputError:  # the results have the reason
        return None


def _summary(study: Study, sweep: Sweep) -> dict[str, Any]:
    """For programs; times are seconds."""
    return {
        "command": "sweep",
        "study": study.config.model_dump(mode="json", by_alias=True),
        **surroundings(),
        "points": len(sweep.points),
        "computed": sweep.computed,
        "groups": sweep.groups,
        "compiles": sweep.compiles,
        "compiles_too_large": sweep.too_large,
        "devices": sweep.devices,
        "wall_s": {"setup": sweep.setup_s, "evaluate": sweep.seconds},
        "best": {name: sweep.best(name) for name in study.config.metrics},
        "notes": sweep.notes,
    }


def _finite(value: object) -> Any:
    """For JSON, which has no infinite numbers and no NaN: null in their place."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


# Printed results: the best strategies, the Pareto front, elasticities, and the bottlenecks of a point.


def _wins(won: list[Winner]) -> dict[str, dict[str, Any]]:
    """Number of cases in which each strategy is best, and the median lead over the next one there, by strategy."""
    wins = {}
    for name in sorted({winner.row["strategy"] for winner in won}):
        behind = [winner.behind for winner in won if winner.row["strategy"] == name]
        finite = [each for each in behind if np.isfinite(each)]
        wins[name] = {"cases": len(behind), "median_behind": float(np.median(finite)) if finite else None}
    return wins


def _print_wins(study: Study, wins: dict[str, dict[str, Any]], cases: int) -> None:
    table = new_table(
        f"best strategy by {study.config.metrics[0]}, {cases} cases",
        "strategy",
        ("wins", "next strategy behind by\n(median), %"),
    )
    for name, told in sorted(wins.items(), key=lambda item: -item[1]["cases"]):
        behind = "-" if told["median_behind"] is None else f"{100 * told['median_behind']:.1f}"
        table.add_row(name, str(told["cases"]), behind)
    print_table(table)


def _print_worth(study: Study, answers: list[Elasticities]) -> None:
    """The median elasticity of every metric over points, with the 5th and 95th percentile."""
    metrics = [name for name in study.config.metrics if name in METRICS]
    title = "1 % more is so many % more of a metric: median over points (5th to 95th percentile)"
    table = new_table(title, "number", metrics)
    for key in dict.fromkeys(key for answer in answers for key in answer.keys):
        having = [answer for answer in answers if key in answer.keys]
        values = np.concatenate([answer.values[:, :, answer.keys.index(key)] for answer in having])
        at = [list(METRICS).index(name) for name in metrics]
        table.add_row(escape(label_of(key)), *(_spread(values[:, index]) for index in at))
    print_table(table)


def _spread(values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "-"
    middle, low, high = np.quantile(finite, [0.5, 0.05, 0.95]).round(2) + 0.0  # no minus before a zero
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _explanation(told: Explanation) -> dict[str, Any]:
    """For programs; times are seconds."""
    return {
        "hash": told.point.hash,
        "values": told.point.values,
        "exchange": told.exchange,
        "total_s": told.total,
        "bound_s": told.bound,
        "note": told.note,
        "stages": {
            stage: {"time_s": time, "busiest": told.busiest(stage).place, "beside_s": told.beside(stage)}
            for stage, time in told.stages.items()
        },
        "resources": [
            {"kind": each.kind, "index": each.index, "place": each.place, "busy_s": each.busy, "total_s": each.total}
            for each in told.resources
        ],
    }


def _print_explanation(told: Explanation) -> None:
    """The busiest resources of every kind, then stages, total and bound."""
    factor, unit = time_unit(told.total)
    title = f"{told.point.hash}: {told.point.values['strategy']} under {told.exchange} [{unit}]"
    caption = "beside the busiest: delays of paths, and batches in which another one is busiest"
    table = new_table(title, "busy", (*told.stages, "all stages"), caption)
    rows: list[tuple[str, list[float | None]]] = []
    for kind in dict.fromkeys(resource.kind for resource in told.resources):
        of_kind = [resource for resource in told.resources if resource.kind == kind]
        rows += [(each.place, [*(each.busy.get(at, 0.0) for at in told.stages), each.total]) for each in of_kind[:3]]
        rows.append((f"... {len(of_kind)} of this kind", [None] * (len(told.stages) + 1)))
    rows.append(("beside the busiest", [*map(told.beside, told.stages), None]))
    rows.append(("time", [*told.stages.values(), told.total]))
    columns = zip(*(values for _, values in rows), strict=True)
    shown = [aligned(None if value is None else value * factor for value in column) for column in columns]
    for (place, _), *cells in zip(rows, *shown, strict=True):
        table.add_row(place, *(cell.replace(NONE, "") for cell in cells), end_section=place.startswith("..."))
    bound = "none" if told.bound is None else f"{told.bound * factor:.4g} ({as_factor(told.total / told.bound)})"
    table.add_row("lower bound", *[""] * len(told.stages), bound)
    print_table(table)
    print_warnings([told.note] if told.note else [])
