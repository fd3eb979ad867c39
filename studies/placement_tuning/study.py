"""Tuned placements and exchanges beside all others: nine tables, made job by job; see README.md.

    python studies/placement_tuning/study.py --shared FOLDER

A job is not run again while its rows are there: a study that was stopped goes on where it was.

The main table takes 25 minutes on two cores, its first case one minute of one.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import any_exchange
import gains
import gaps
import machines
import main_table
import sensitivity
import uneven
import variations
from cases import HERE, ROOT, RUNS, Run

from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options

JOBS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "main": (main_table.jobs, main_table.COLUMNS),
    "sensitivity": (sensitivity.jobs, sensitivity.COLUMNS),
    "machines": (machines.jobs, machines.COLUMNS),
    "gaps": (gaps.jobs, gaps.COLUMNS),  # of the cells of `machines` that turn out to be far off
    "any_exchange": (any_exchange.jobs, any_exchange.COLUMNS),
    "gains": (gains.jobs, gains.COLUMNS),
    "uneven": (uneven.jobs, uneven.COLUMNS),
    "variations": (variations.jobs, variations.COLUMNS),
}


def names(table: str, run: Run) -> list[tuple[str]]:
    """Jobs of a table."""
    return [(name,) for name in JOBS[table][0](run)]


def rows(table: str, run: Run, name: str) -> list[dict]:
    """Rows of a job."""
    return [{"job": name} | row for row in JOBS[table][0](run)[name]()]


def tables(given: Namespace) -> list[Table]:
    """All tables, each of whose cases is a job."""
    run = Run(given.shared, given.layers_step, given.quick, given.out)
    return [
        Table(table, partial(rows, table, run), partial(names, table, run), ("job",), columns)
        for table, (_, columns) in JOBS.items()
    ]


if __name__ == "__main__":
    parser = study_options(__doc__, resume=True)
    add_shared(parser, ROOT.parent / "shared", "traces", "reference")
    parser.add_argument("--layers-step", type=int, default=8, help="every so many layers are in the main table")
    given = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    make_tables(HERE, tables(given), given, compiled=RUNS / "compiled")
