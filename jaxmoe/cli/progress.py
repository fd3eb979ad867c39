"""Progress bars on a terminal, silence elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxmoe.cli.session import messages
from jaxmoe.experiment.clock import Report


@contextmanager
def progress_bars(check: Callable[[], None]) -> Iterator[Report]:
    """One bar for each stage that is reported; they go when all is done. Every report calls `check` as well."""
    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def report(stage: str, done: int, total: int) -> None:
            check()
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
