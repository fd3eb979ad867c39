"""Every table of a paper's study, made by one command: its scripts one after another, those first that others read.

`python studies/remake.py STUDY --shared FOLDER` writes to `studies/STUDY/runs/tables`; `--out studies/STUDY` makes the
committed tables anew, which verdicts on claims are read from. All take hours. Tables that are there stay, but for those
that are stale or of unknown age: these are removed first, so that a run that was stopped goes on where it was. `--list`
tells of them, in seconds, and makes none.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from jaxmoe.experiment.table_age import FILE, read, stale, unnoted

STUDIES = Path(__file__).resolve().parent
SCRIPTS = {
    "wafer_gpu": ("study", "breakdown", "claims"),
    "moentwine": ("geometry", "agreement", "balancing", "mapping", "deployed", "study"),
    "hd_moe": ("study", "trials", "windows", "deployed", "claims"),
    "camoe": (
        *("profile", "table1", "capacity", "unlike", "gate", "traffic", "controller", "recorded", "gradient", "joint"),
        "claims",
    ),
    "expert_streaming": (
        *("study", "deployed", "readings", "agreement", "design", "knee", "elsewhere", "speed", "activity"),
        "claims",
    ),
}
TOLD = 3  # files that a list names of those that a table is older than
OWN_RESUME = ("hd_moe/study", "moentwine/mapping")  # have no option for it


def command(study: str, script: str, out: Path, shared: Path) -> list[str]:
    """What runs a script, with the options that it has."""
    path = STUDIES / study / f"{script}.py"
    options = ["--out", str(out)]
    if script != "claims" and f"{study}/{script}" not in OWN_RESUME:
        options.append("--resume")  # verdicts are read off the tables each time
    if "--shared" in path.read_text() or "add_shared(" in path.read_text():
        options += ["--shared", str(shared)]
    return [sys.executable, str(path), *options]


def ages(study: str, out: Path) -> dict[str, str]:
    """What is told of tables that code made which has changed, and of those of which nothing is noted."""
    changed = {name: f"is older than {_some(files)}" for name, files in stale(out, STUDIES / study).items()}
    return changed | dict.fromkeys(unnoted(out), "has no note of what made it")


def _some(files: list[str]) -> str:
    more = len(files) - TOLD
    return ", ".join(files[:TOLD]) + (f" and {more} more" if more > 0 else "")


def due(study: str, script: str, out: Path) -> bool:
    """Whether a script that cannot resume has to run: a table of its is not there, or none is known."""
    command = f"{study}/{script}.py"
    own = [name for name, made in read(out / FILE).items() if made["command"].split()[0] == command]
    return not own or not all((out / f"{name}.csv").is_file() for name in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=SCRIPTS, metavar="STUDY", help=", ".join(SCRIPTS))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the tables, runs/tables of the study")
    shared = STUDIES.parents[1] / "shared"
    parser.add_argument("--shared", type=Path, default=shared, metavar="FOLDER", help="has traces/ and reference/")
    parser.add_argument("--list", action="store_true", help="tell tables that are stale or of unknown age, make none")
    given = parser.parse_args()
    out = (given.out or STUDIES / given.study / ("" if given.list else "runs/tables")).resolve()
    old = ages(given.study, out)
    if given.list:
        print("\n".join(f"{name} {told}" for name, told in old.items()) or "all tables are as old as their code")
        return
    for name in old:
        (out / f"{name}.csv").unlink(missing_ok=True)
    failed = [
        script
        for script in SCRIPTS[given.study]
        if (f"{given.study}/{script}" not in OWN_RESUME or due(given.study, script, out))
        and subprocess.run(command(given.study, script, out, given.shared.resolve())).returncode
    ]
    if failed:
        sys.exit(f"{', '.join(failed)} failed; the others are in {out}")


if __name__ == "__main__":
    main()
