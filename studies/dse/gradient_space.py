"""Gradient against grid on the 100,000 machines of `space.py`, at each size of batch; see README.md.

    python studies/dse/gradient_space.py [--only /128]

The grid's best are read from `space_fronts.csv`. A size of batch replaces its own row of `gradient_space.csv`.
One takes 15 to 21 minutes on two busy cores.
"""

import time
from collections.abc import Sequence

from space import HERE, MESH, STUDY, TOKENS

from jaxmoe.config.hardware_space import SpaceFile, read_space
from jaxmoe.experiment.codesign.discrete import TriedChoice, tune_space
from jaxmoe.experiment.codesign.search import HardwareResult
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.placement.named import compared_strategies
from jaxmoe.sweep import Space, Study, read_study

Found = tuple[HardwareResult, list[TriedChoice], float]  # with the seconds of the search


def limit_of(file: SpaceFile) -> float:
    """The price that machines may have."""
    (constraint,) = file.space.constraints
    return float(constraint.rpartition("<=")[2])


def affordable(study: Study, limit: float) -> int:
    """How many points of the grid a search would time that leaves out at once what costs too much."""
    axes = study.config.axes | {TOKENS: study.config.axes[TOKENS][:1], "strategy": study.config.axes["strategy"][:1]}
    one = Study(study.path, study.config.model_copy(update={"axes": axes, "where": (f"price <= {limit}",)}))
    return len(Space(one).points()) * len(study.config.axes["strategy"])


def grid_best(rows: Sequence[dict[str, str]], tokens: int, limit: float) -> dict[str, str]:
    """The fastest machine of a front that costs no more."""
    within = [row for row in rows if int(row["tokens"]) == tokens and float(row["price"]) <= limit]
    return min(within, key=lambda row: float(row["total_us"]))


def search(file: SpaceFile, study: Study, tokens: int) -> Found:
    """What `jaxmoe tune --hardware` does at a size of batch, and its seconds; it knows nothing of the grid."""

    def report(stage: str, done: int, total: int) -> None:
        print(f"{tokens} tokens: {stage} {done} of {total}    ", end="\r", flush=True)

    start = time.perf_counter()
    with StageTimer() as clock:
        fixed = study.config.set | {TOKENS: tokens}
        found = tune_space(file, HERE / str(study.config.scenario), fixed, study.config.layers, report, clock)
    return *found, time.perf_counter() - start


def row_of(tokens: int, points: int, grid: dict[str, str], found: Found) -> dict:
    """One row; times in microseconds. `evaluations` are machines timed, forward and backward each as one."""
    result, tried, seconds = found
    (met,) = result.best.constraints
    usual = min((each for each in result.candidates if each.name in compared_strategies()), key=lambda each: each.own)
    counts = result.evaluations
    return {
        "tokens": tokens,
        "grid_points": points,
        "grid_us": grid["total_us"],
        "grid_mesh": grid["mesh"],
        "grid_strategy": grid["strategy"],
        "usual_us": usual.own * 1e6,
        "usual": usual.name,
        "tuned_us": result.best.metric * 1e6,
        "tuned": " ".join([result.best.strategy.name, *result.best.strategy.placement.exchange]),
        "mesh": "x".join(map(str, result.best.scenarios[0].hardware.mesh_shape)),
        "price": met.left,
        "over_limit": met.excess,
        "us_per_unit_of_price": met.shadow_price * 1e6,
        "evaluations": sum(counts.values()),
        "part_of_grid": sum(counts.values()) / points,
        **{f"to_{name.replace(' ', '_')}": count for name, count in counts.items()},
        **{key.rpartition(".")[2]: result.best.numbers[key] for key in result.problem.keys},
        "choices_us": " ".join(map(_text, tried)),
        "seconds": seconds,
    }


def _text(each: TriedChoice) -> str:
    mesh = "x".join(map(str, each.values[MESH]))
    return f"{mesh}:{'none' if each.metric is None else format(each.metric * 1e6, '.5g')}"


def rows(tokens: int) -> list[dict]:
    """The row of a size of batch."""
    study, file = read_study(STUDY), read_space(HERE / "mesh_budget.yaml")
    limit = limit_of(file)
    grid = grid_best(read_table(HERE / "space_fronts.csv"), tokens, limit)
    return [row_of(tokens, affordable(study, limit), grid, search(file, study, tokens))]


if __name__ == "__main__":
    sizes = [(tokens,) for tokens in sorted(read_study(STUDY).config.axes[TOKENS])]
    make_tables(
        HERE, [Table("gradient_space", rows, sizes, ("tokens",), digits=6)], study_options(__doc__).parse_args()
    )
