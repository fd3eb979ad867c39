"""Extras of this package that are not installed: the command that installs one, here."""

import shlex
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from jaxmoe.errors import InputError


def install_command(extra: str, package: str) -> str:
    """The command that installs a package, with what else is in the extra of it.

    It is of the clone that jaxmoe runs from, where it does, else of packages by name, and installs where jaxmoe is,
    whether that environment is activated or not. The extra may be another package's.
    """
    clone, needed = Path(__file__).resolve().parents[1], _needed(extra)
    if not needed:
        return f"{_pip()} install '{package}'"
    if (clone / "pyproject.toml").is_file():
        return f"{_pip()} install '{'.' if clone == Path.cwd() else clone}[{extra}]'"
    return f"{_pip()} install " + " ".join(f"'{each}'" for each in needed)


def check_parquet(command: str = "jaxmoe sweep") -> None:
    """Raise `InputError` where the package that writes results of many points is missing."""
    if find_spec("pyarrow") is None:
        raise InputError(f"{command} needs pyarrow; install it with: {install_command('sweep', 'pyarrow')}")


def _pip() -> str:
    """The shell's `pip` where it is of the Python that runs, else that Python's."""
    python, found = Path(sys.executable), which("pip")
    if found is not None and Path(found).parent == python.parent:
        return "pip"
    shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shlex.quote(str(shown))} -m pip"


def _needed(extra: str) -> list[str]:
    """Requirements of an extra, those of extras that it names among them."""
    found: list[str] = []  # "plotly>=6; extra == 'report'", "jaxmoe[sweep]; extra == 'ray'"
    for line in requires("jaxmoe") or []:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if extra in marker.replace("'", '"').split('"')[1::2]:
            inner = requirement.removeprefix("jaxmoe[")
            found += [requirement] if inner == requirement else _needed(inner.removesuffix("]"))
    return found
