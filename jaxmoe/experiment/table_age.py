"""What made the tables of a folder, kept beside them in `made.json`: the command, the seed, and the code by digests.

A record of a table has, by file, the digests of the pieces of code that its process ran through until its rows were
made, of the package and of the study. So a table is stale where one of these pieces is no longer there. Where only some
cases were made anew, the others' digests stay: the table is stale until all its cases are made by the same code.
"""

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jaxmoe.experiment import code_pieces

FILE = "made.json"
ROOT = Path(__file__).absolute().parents[2]
Code = dict[str, str]  # digests one after another, by path from the folder of the package, of a study's own by name


def code_of(study: Path) -> Code:
    """What this process ran through since `code_pieces.watch`, but for files that only keep tables."""
    study, code = study.resolve(), {}
    for file, digests in code_pieces.digests_of_what_ran((ROOT / "jaxmoe", study)).items():
        if file.is_relative_to(ROOT / "jaxmoe"):
            code[file.relative_to(ROOT).as_posix()] = "".join(sorted(digests))
        elif file.parent == study:
            code[file.name] = "".join(sorted(digests))
    return dict(sorted(code.items()))


def joined(code: Code, other: Code) -> Code:
    """All that either of two runs ran through."""
    both = {file: {*_digests(code.get(file, "")), *_digests(other.get(file, ""))} for file in sorted({*code, *other})}
    return {file: "".join(sorted(digests)) for file, digests in both.items()}


def record(table: Path, study: Path, code: Code, seed: object, whole: bool) -> None:
    """Note what made a table; `whole`, all its rows, else those of some cases. Of unknown rows nothing is noted."""
    path, name = table.with_name(FILE), table.stem
    made = read(path)
    if whole or name in made:
        given = ("FOLDER" if Path(each).is_absolute() else each for each in sys.argv[1:])  # no paths of a machine
        command = " ".join([f"{study.name}/{Path(sys.argv[0]).name}", *given])
        made[name] = {"command": command, "seed": seed, "code": code if whole else joined(made[name]["code"], code)}
        lines = (f"{json.dumps(key)}: {json.dumps(made[key], default=str)}" for key in sorted(made))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def stale(folder: Path, study: Path | None = None) -> dict[str, list[str]]:
    """Tables of a folder, that of their study or another, which ran through code that is not there now: its files."""
    study = study or folder
    now = code_pieces.digests(study.glob("*.py")) | _digests_of_the_package()
    told = {
        name: [file for file, digests in each["code"].items() if not now.issuperset(_digests(digests))]
        for name, each in read(folder / FILE).items()
    }
    return {name: files for name, files in told.items() if files}


def unnoted(folder: Path) -> list[str]:
    """Tables of a folder of which nothing is known, in the order of their names."""
    return sorted({path.stem for path in folder.glob("*.csv")} - read(folder / FILE).keys())


def seed_of(rows: object) -> Mapping[str, Any]:
    """Seeds that the module of a function of rows names, `SEED` or `SEEDS`."""
    module = sys.modules.get(getattr(rows, "func", rows).__module__)
    return {name: repr(getattr(module, name)) for name in ("SEED", "SEEDS") if hasattr(module, name)}


def _digests(text: str) -> list[str]:
    return [text[start : start + code_pieces.DIGITS] for start in range(0, len(text), code_pieces.DIGITS)]


@cache
def _digests_of_the_package() -> set[str]:
    return code_pieces.digests((ROOT / "jaxmoe").rglob("*.py"))
