"""What surrounds every verb: the output folder, one clear message for bad input, and exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from jaxmoe.cli.interrupts import INTERRUPTED, Interrupts
from jaxmoe.cli.output import OutputFolder
from jaxmoe.errors import InputError

BAD_INPUT = 2


def messages() -> Console:
    """Where errors, warnings and progress go: never mixed with results."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def session(out: Path, verbose: bool) -> Iterator[tuple[OutputFolder, Interrupts]]:
    """Run a verb in here: yields its output folder, and an object that checks for Ctrl-C.

    Ends with exit code 2 on bad input, 130 on Ctrl-C.
    """
    folder = OutputFolder(out)
    try:
        with Interrupts() as interrupts, folder:
            yield folder, interrupts
            interrupts.check()
    except (InputError, OSError) as error:
        if verbose:
            messages().print_exception()
        messages().print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        kept = f"complete in {folder.path}: {', '.join(folder.written)}" if folder.written else "nothing was written"
        messages().print(f"[bold red]interrupted;[/] {escape(kept)}")
        raise typer.Exit(INTERRUPTED) from None
