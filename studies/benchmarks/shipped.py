"""Every shipped scenario by its plain command, in a process that has compiled nothing: seconds and peak memory.

    python studies/benchmarks/shipped.py --only quickstart wafer_gpu/

A minute for most of the scenarios on two cores, three quarters of an hour for all. Those that are in the table stay,
so that a run that was stopped goes on; `--no-resume` makes them anew. See README.md.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxmoe.config import Scenario, load_scenario
from jaxmoe.config.files import shipped_names
from jaxmoe.experiment.table import Table, make_tables, study_options

HERE = Path(__file__).resolve().parent
CACHE = "JAX_COMPILATION_CACHE_DIR"  # what it keeps is left out: users have nothing compiled


def plain_command(scenario: Scenario) -> list[str]:
    """The verb that runs a scenario as configs/README.md says, and its option for a deployment."""
    if scenario.serving is not None:
        return ["serve"]
    if scenario.system.name != "static":
        return ["simulate"]
    return ["evaluate", "--phase", "decode"] if scenario.deployment is not None else ["evaluate"]


def rows(name: str) -> Iterator[dict[str, object]]:
    verb, *options = plain_command(load_scenario(name))
    alone = {key: value for key, value in os.environ.items() if key != CACHE}
    with TemporaryDirectory() as folder:
        given = [verb, name, *options]
        start = time.perf_counter()
        call = [sys.executable, "-m", "jaxmoe", *given, "--out", folder, "--quiet"]
        process = subprocess.Popen(call, env=alone, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    yield {
        "scenario": name,
        "command": " ".join(["jaxmoe", *given]),
        "exit": process.returncode,
        "core_s": f"{used.ru_utime + used.ru_stime:.0f}",
        "wall_s": f"{time.perf_counter() - start:.0f}",
        "peak_GiB": f"{used.ru_maxrss / 2**20:.2f}",
    }


if __name__ == "__main__":
    cases = [(name,) for name in shipped_names("scenarios")]
    given = study_options(__doc__, resume=True).parse_args()
    make_tables(HERE, [Table("shipped", rows, cases, key=("scenario",))], given)
