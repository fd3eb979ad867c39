"""Gradient against grid: the fastest machine for a cost, by a sweep and by descent; see README.md.

Takes about 15 minutes on two busy cores.
"""

import time
from pathlib import Path

from jaxmoe.config.expressions import Expression
from jaxmoe.config.hardware_space import read_space
from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.codesign.search import tune_hardware
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.sweep import read_study, run_sweep

HERE = Path(__file__).parent
SPACES = {"gradient": "budget_space.yaml", "gradient, with placement": "budget_space_tuned.yaml"}
COLUMNS = ("method", "starts", "machines_timed", "total_us", "cost", "strategy", "residual", "us_per_unit_of_cost")


def grid(folder: Path, keys: tuple[str, ...], cost: str) -> dict[str, object]:
    """The best point of the grid; a run that was stopped goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    sweep = run_sweep(read_study(HERE / "budget_grid.yaml"), folder, lambda done, total: None)
    best = sweep.best("total")
    assert best is not None
    return {
        "method": "grid",
        "machines_timed": len(sweep.points),
        "total_us": best["total_s"] * 1e6,
        "cost": Expression(cost)(best),
        "strategy": best["strategy"],
        "seconds": time.perf_counter() - start,
    } | {key: best[key] for key in keys}


def gradient(name: str, file: str) -> dict[str, object]:
    """The best machine by descent, without a word on the grid."""
    start = time.perf_counter()
    problem = hardware_problem(read_space(HERE / file), HERE / "mesh_4x4.yaml", {}, [3])
    with StageTimer() as clock:
        result = tune_hardware(problem, lambda stage, done, total: None, clock)
    (budget,) = result.best.constraints
    return {
        "method": name,
        "starts": problem.space.starts,
        "machines_timed": sum(result.evaluations.values()),
        "total_us": result.best.metric * 1e6,
        "cost": budget.left,
        "strategy": result.best.strategy.name,
        "residual": result.best.residual,
        "us_per_unit_of_cost": budget.shadow_price * 1e6,
        "seconds": time.perf_counter() - start,
    } | {key: result.best.numbers[key] for key in problem.keys}


def main() -> None:
    """Write gradient.csv; the grid's folder keeps its points."""
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--grid", type=Path, default=Path("runs/budget_grid"), help="the folder of the sweep")
    given = parser.parse_args()
    space = read_space(HERE / "budget_space.yaml").space
    rows = [gradient(name, file) for name, file in SPACES.items()]
    rows.append(grid(given.grid.absolute(), tuple(space.variables), str(space.derived["cost"])))
    write_table(folder_of_tables(HERE, given) / "gradient.csv", rows, [*COLUMNS, *space.variables, "seconds"], digits=6)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
