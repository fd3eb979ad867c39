"""What made the tables of a folder, kept beside them in `made.json`: the command, the seed, and the code by digests.

A record of a table has the digest of every source file of the package and of the study that was loaded when its rows
were made, but for comments and docstrings. So a table is stale where code of one of them has changed since. Where only
some cases were made anew, the others' digests stay: the table is stale until all its cases are made by the same code.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = "made.json"
ROOT = Path(__file__).absolute().parents[2]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Code = dict[str, str]  # digests by path from the folder of the package, of a study's own by name


def code_of(study: Path) -> Code:
    """Digests of what this process has loaded of the package and of a study, but for this file, which makes no row."""
    own, folder, code = f"{ROOT / 'jaxmoe'}{os.sep}", f"{study.resolve()}{os.sep}", {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None) or ""
        if file == __file__:
            continue
        if file.startswith(own):
            code[Path(file).relative_to(ROOT).as_posix()] = _digest_as_loaded(Path(file))
        elif file.startswith(folder) and os.sep not in file.removeprefix(folder):
            code[Path(file).name] = _digest_as_loaded(Path(file))
    return dict(sorted(code.items()))


def record(table: Path, study: Path, code: Code, seed: object, whole: bool) -> None:
    """Note what made a table; `whole`, all its rows, else those of some cases. Of unknown rows nothing is noted."""
    path, name = table.with_name(FILE), table.stem
    made = read(path)
    if whole or name in made:
        older = {} if whole else made[name]["code"]
        given = ("FOLDER" if Path(each).is_absolute() else each for each in sys.argv[1:])  # no paths of a machine
        command = " ".join([f"{study.name}/{Path(sys.argv[0]).name}", *given])
        made[name] = {"command": command, "seed": seed, "code": code | older}
        lines = (f"{json.dumps(key)}: {json.dumps(made[key], default=str)}" for key in sorted(made))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def stale(study: Path) -> dict[str, list[str]]:
    """Tables of a study that code made which has changed, and its files."""
    told = {}
    for name, each in read(study / FILE).items():
        paths = {file: (ROOT if "/" in file else study) / file for file in each["code"]}
        told[name] = [file for file, path in paths.items() if not path.is_file() or _digest(path) != each["code"][file]]
    return {name: files for name, files in told.items() if files}


def unnoted(study: Path) -> list[str]:
    """Tables of a study of which nothing is known, in the order of their names."""
    return sorted({path.stem for path in study.glob("*.csv")} - read(study / FILE).keys())


def seed_of(rows: object) -> Mapping[str, Any]:
    """Seeds that the module of a function of rows names, `SEED` or `SEEDS`."""
    module = sys.modules.get(getattr(rows, "func", rows).__module__)
    return {name: repr(getattr(module, name)) for name in ("SEED", "SEEDS") if hasattr(module, name)}


def _digest(path: Path) -> str:
    """Of the code of a file: comments, docstrings and layout do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


_digest_as_loaded = cache(_digest)  # a file that changes later is not what runs
