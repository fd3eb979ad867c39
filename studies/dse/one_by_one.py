"""How fast machines are evaluated one by one, to compare with the sweep of `space.py`; see README.md.

    python studies/dse/one_by_one.py --machines 3

Two ways: a process of `jaxmoe evaluate` for each machine and size of batch, as a user would, and the same evaluation in
one process that keeps what it compiled, without the replay in the event simulator that the command adds. For the
latter's sake the command is timed at the smallest size of batch alone.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from space import HERE, MESH, STUDY, TOKENS

from jaxmoe.experiment import inputs_of, score, standard_strategies
from jaxmoe.experiment.table import earlier_table, folder_of_tables, script_options
from jaxmoe.files import read_table, write_table
from jaxmoe.sweep import Space, Study, read_study
from jaxmoe.sweep.point import Point

MESHES = ([4, 4], [8, 8])  # of the machines measured


@dataclass(frozen=True)
class Pace:
    """Points that were evaluated, in wall seconds and in seconds of all cores."""

    points: int
    seconds: float
    cpu_s: float


def few(study: Study, machines: int) -> Study:
    """The study on its first machines of two meshes, and one strategy for all."""
    axes = study.config.axes
    update = {
        "axes": axes | {MESH: [*MESHES], "strategy": axes["strategy"][:1]},
        "sample": study.config.sample.model_copy(update={"sobol": machines}),
    }
    return Study(study.path, study.config.model_copy(update=update))


def by_command(space: Space, point: Point) -> Pace:
    """All strategies of a machine by a process of the command, which counts as the study's strategies alone."""
    values = {key: value for key, value in (space.fixed | point.values).items() if key not in ("strategy", "exchange")}
    sets = [f"--set={key}={value}" for key, value in values.items() if key not in space.parameters]
    strategies = len(read_study(STUDY).config.axes["strategy"])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxmoe", "evaluate", str(space.study.scenario), "--out", folder]
        start, used = time.perf_counter(), _children()
        subprocess.run([*command, "--layers", str(space.study.layers), *sets], check=True, capture_output=True)
        return Pace(strategies, time.perf_counter() - start, _children() - used)


def _children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def in_process(space: Space, point: Point) -> Pace:
    """The study's strategies on a machine, here."""
    wanted = read_study(STUDY).config.axes["strategy"]
    start, used = time.perf_counter(), time.process_time()
    inputs = inputs_of(space.scenario(point.values), layers=space.study.layers)
    for strategy in standard_strategies(inputs):
        if strategy.name in wanted:
            score(inputs, strategy, inputs.evaluation_batches)
    return Pace(len(wanted), time.perf_counter() - start, time.process_time() - used)


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--machines", type=int, default=3, help="machines of each mesh and size of batch")
    options = parser.parse_args()
    space = Space(few(read_study(STUDY), options.machines))
    points = space.points()
    least = min(point.values[TOKENS] for point in points)
    rates = read_table(earlier_table(HERE, options, "space_rates"))
    # By rates: a part that was stopped has the seconds of what was left alone.
    seconds = sum(float(row["points"]) / float(row["points_per_s"]) for row in rates)
    swept = sum(float(row["points"]) for row in rates) / seconds
    rows = []
    ways = (("jaxmoe evaluate, a process each", by_command, True), ("one process", in_process, False))
    for way, evaluate, smallest in ways:
        # The event simulator takes minutes for larger batches.
        for point in (point for point in points if not smallest or point.values[TOKENS] == least):
            pace = evaluate(space, point)
            mesh, tokens = point.values[MESH], point.values[TOKENS]
            rate = pace.points / pace.seconds
            rows.append(
                {"way": way, "mesh": f"{mesh[0]}x{mesh[1]}", "tokens": tokens, "points": pace.points}
                | {"seconds": f"{pace.seconds:.2f}", "cpu_s": f"{pace.cpu_s:.2f}", "points_per_s": f"{rate:.3f}"}
                | {"sweep_is_faster_by": f"{swept / rate:.0f}"}
            )
            print(*rows[-1].values(), sep=", ", flush=True)
    write_table(folder_of_tables(HERE, options) / "space_one_by_one.csv", rows)


if __name__ == "__main__":
    main()
