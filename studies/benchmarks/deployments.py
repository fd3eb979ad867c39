"""Deployments of a whole model that a sweep prices in a second; see README.md.

The sweep runs in a process that has compiled nothing, then again. The baseline prices some of its points one at a
time, compiled as well, and has to tell the same. Seconds are those of processors, so that
other work counts less; the last sweep's are told by the clock as well.
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxmoe.experiment.deployment import deployed
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.sweep.deployments import DeploymentSweep, sweep_deployments
from jaxmoe.sweep.study import read_study

HERE = Path(__file__).resolve().parent
ROUNDS, SAMPLED = 4, 8


def swept() -> tuple[DeploymentSweep, float, float]:
    """A sweep, and its seconds of processors and by the clock, from the study's file to the last row."""
    start, begun = time.process_time(), time.perf_counter()
    sweep = sweep_deployments(read_study(HERE / "deployments.yaml"), lambda done, total: None)
    return sweep, time.process_time() - start, time.perf_counter() - begun


def one_at_a_time(sweep: DeploymentSweep) -> float:
    """Seconds of processors of a point by itself; raises where it tells another time than the sweep."""
    points = [(at, row) for at, row in enumerate(sweep.space.points()) if sweep.rows[at]["left_out"] is None]
    sampled = points[:: len(points) // SAMPLED]
    cases = [(sweep.rows[at], deployed(sweep.space.scenario(point.values))) for at, point in sampled]
    seconds = []
    for row, own in cases * 2:
        start = time.process_time()
        told = np.array([own.serve().first_token, own.serve().per_token])
        seconds.append((time.process_time() - start) / 2)
        np.testing.assert_allclose(told, [row["first_token_s"], row["per_token_s"]], rtol=1e-5)
    return float(np.median(seconds[len(cases) :]))


def rows() -> Iterator[dict[str, object]]:
    _, cold, _ = swept()
    # Rows of an earlier sweep that were kept would be looked through by the collector of garbage again and again.
    runs = [swept()[1:] for _ in range(ROUNDS)]
    again, clock = (min(seconds) for seconds in zip(*runs, strict=True))
    last = swept()[0]
    count = len(last.priced)
    yield {
        "deployments": len(last.rows),
        "priced": count,
        "kinds": last.kinds,
        "cold_core_s": f"{cold:.1f}",
        "cold_per_core_s": f"{count / cold:.0f}",
        "again_core_s": f"{again:.1f}",
        "again_per_core_s": f"{count / again:.0f}",
        "again_per_s": f"{count / clock:.0f}",  # by the clock, on all cores
        "one_at_a_time_per_core_s": f"{1 / one_at_a_time(last):.0f}",
        "peak_GiB": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",
    }


if __name__ == "__main__":
    make_tables(HERE, tables_of({"deployments": rows}, timed=["deployments"]), study_options(__doc__).parse_args())
