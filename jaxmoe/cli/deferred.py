"""Commands: a signature on the command line, whose body is in a module of its own that is loaded when it runs."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxmoe.cli.session import session
from jaxmoe.config import load_scenario
from jaxmoe.config.hardware_space import read_space


def runs(
    module: str,
    function: str = "run",
    scenario: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Callable[[Callable], Callable]:
    """Give a signature the body `function(folder, interrupts, ...)` of a module of this package.

    A wrong key in a `scenario`, or in a file that `check` reads, is reported before JAX is loaded. A pipe is not
    checked early, as it can be read only once.
    """

    def with_body(signature: Callable) -> Callable:
        @wraps(signature)
        def command(out: Path, verbose: bool, **given: Any) -> None:
            with session(out, verbose) as (folder, interrupts):
                if check is not None and not _is_pipe(given["config"]):
                    check(given["config"])
                if scenario and not _is_pipe(given["config"]):
                    load_scenario(given["config"], given["overrides"] or ())
                if given.get("hardware") is not None:
                    read_space(given["hardware"])
                body = getattr(import_module(f"jaxmoe.cli.{module}"), function)
                body(folder, interrupts, **given)

        return command

    return with_body


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file()
