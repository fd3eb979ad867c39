"""Every table of a paper's study, made by one command: its scripts one after another, those first that others read.

`python studies/remake.py STUDY --shared FOLDER` writes to `studies/STUDY/runs/tables`; `--out studies/STUDY` makes the
committed tables anew, which verdicts on claims are read from. It takes hours. Stopped, it goes on where it was: tables
that are there stay. `--list` tells which tables are stale or of unknown age, in seconds, and makes none.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from jaxmoe.experiment.table_age import stale, unnoted

STUDIES = Path(__file__).resolve().parent
SCRIPTS = {
    "wafer_gpu": ("study", "breakdown", "claims"),
    "moentwine": ("geometry", "agreement", "balancing", "mapping", "deployed", "study"),
    "hd_moe": ("study", "windows", "deployed", "claims"),
    "camoe": (
        *("profile", "table1", "capacity", "unlike", "gate", "traffic", "controller", "recorded", "gradient", "joint"),
        "claims",
    ),
    "expert_streaming": (
        *("study", "deployed", "readings", "agreement", "design", "knee", "elsewhere", "speed", "activity"),
        "claims",
    ),
}
OWN_RESUME = ("hd_moe/study", "moentwine/mapping")  # keep their jobs' rows, or none, and have no option for it


def command(study: str, script: str, out: Path, shared: Path) -> list[str]:
    """What runs a script, with the options that it has."""
    path = STUDIES / study / f"{script}.py"
    options = ["--out", str(out)]
    if script != "claims" and f"{study}/{script}" not in OWN_RESUME:
        options.append("--resume")  # verdicts are read off the tables each time
    if "--shared" in path.read_text() or "add_shared(" in path.read_text():
        options += ["--shared", str(shared)]
    return [sys.executable, str(path), *options]


def ages(study: str) -> list[str]:
    """Lines on tables that code made which has changed, and on those of which nothing is noted."""
    changed = [f"{name} is older than {', '.join(files)}" for name, files in stale(STUDIES / study).items()]
    return [*changed, *(f"{name}: nothing is noted of what made it" for name in unnoted(STUDIES / study))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=SCRIPTS, metavar="STUDY", help=", ".join(SCRIPTS))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the tables, runs/tables of the study")
    shared = STUDIES.parents[1] / "shared"
    parser.add_argument("--shared", type=Path, default=shared, metavar="FOLDER", help="has traces/ and reference/")
    parser.add_argument("--list", action="store_true", help="tell tables that are stale or of unknown age, make none")
    given = parser.parse_args()
    if given.list:
        print("\n".join(ages(given.study)) or "all tables are as old as their code")
        return
    out = (given.out or STUDIES / given.study / "runs" / "tables").resolve()
    failed = [
        script
        for script in SCRIPTS[given.study]
        if subprocess.run(command(given.study, script, out, given.shared.resolve())).returncode
    ]
    if failed:
        sys.exit(f"{', '.join(failed)} failed; the others are in {out}")


if __name__ == "__main__":
    main()
