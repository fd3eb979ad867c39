"""Tables for people, on standard output."""

from collections.abc import Iterable

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.session import messages
from jaxmoe.experiment.comparison import Comparison
from jaxmoe.experiment.strategies import TUNED
from jaxmoe.experiment.validation import Figures, Trial, trials_agreement
from jaxmoe.plotting.style import time_unit

WIDTH = 140  # where there is no terminal to tell


def print_comparison(comparison: Comparison, title: str) -> None:
    """Mean over layers of every strategy."""
    factor, unit = time_unit(max(float(score.layer_total.mean()) for score in comparison.scores.values()))
    table = Table(title=f"{title} [{unit}]".replace("[", r"\["))
    table.add_column("strategy", no_wrap=True)
    for column in ("dispatch", "compute", "combine", "total", "p95", "simulated\n(model there)"):
        table.add_column(column, justify="right")
    tuned = TUNED in comparison.scores
    if tuned:
        table.add_column("tuned faster by\nmean (least)", justify="right")
    for name in comparison.strategies:
        row = [f"{seconds * factor:.4g}" for seconds in _means(comparison, name)]
        simulated = _simulated(comparison, name, factor)
        table.add_row(_marked(comparison, name), *row, simulated, *([_gain(comparison, name)] if tuned else []))
    print_table(table)


def print_warnings(lines: Iterable[str]) -> None:
    """What a reader has to know, one line each, apart from the results."""
    for line in lines:
        messages().print(f"[yellow]note:[/] {escape(line)}")


def comparison_warnings(comparison: Comparison) -> list[str]:
    """Notes on strategies, and every strategy that is faster than the tuned plan somewhere."""
    notes = [f"{name}: {strategy.note}" for name, strategy in comparison.strategies.items() if strategy.note]
    if TUNED in comparison.scores:
        for name in comparison.scores:
            ahead = comparison.speedup(name) < 1
            if ahead.any():
                notes.append(f"{name} is faster than {TUNED} on {ahead.sum()} of {ahead.size} layers")
    return notes


def print_agreement(trials: list[Trial]) -> None:
    """How model and simulator agree, by strategy and batch size, and how long it takes without barriers."""
    table = Table(title="model against event simulation")
    table.add_column("strategy", no_wrap=True)
    for column in ("tokens", "communication\nR2", "mean abs\nerror, %", "total\nR2", "mean abs\nerror, %"):
        table.add_column(column, justify="right")
    table.add_column("simulated total\nwithout barriers", justify="right")
    for trial in trials:
        table.add_row(escape(trial.strategy.name), str(trial.tokens), *_figures([trial]))
    table.add_row("all", "", *_figures(trials))
    print_table(table)


def _figures(trials: list[Trial]) -> tuple[str, ...]:
    """R2 and error of communication and of the total, and the part of the time without barriers."""
    texts = [text for figures in trials_agreement(trials).values() for text in _agreement_cells(figures)]
    free, whole = (sum(float(getattr(t.simulated, name).sum()) for t in trials) for name in ("free_running", "total"))
    return *texts, f"{100 * free / whole:.1f} %"


def _agreement_cells(figures: Figures) -> tuple[str, str]:
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return "-" if r2 is None else f"{r2:.6f}", "-" if error is None else f"{error:.3f}"


def _means(comparison: Comparison, name: str) -> list[float]:
    score = comparison.scores[name]
    return [float(np.mean(part)) for part in (score.dispatch, score.compute, score.combine, score.total)] + [
        float(score.p95_total.mean())
    ]


def _simulated(comparison: Comparison, name: str, factor: float) -> str:
    """The simulator's mean, and the model's on the same batches: they are fewer than those of other columns."""
    simulated, model = comparison.replays[name].total.mean(), comparison.replayed(name).total.mean()
    return f"{simulated * factor:.4g} ({model * factor:.4g})"


def _marked(comparison: Comparison, name: str) -> str:
    """The name, and whether its plan is illegal."""
    return escape(name) + ("" if comparison.strategies[name].fits else " (does not fit)")


def _gain(comparison: Comparison, name: str) -> str:
    if name == TUNED:
        return ""
    ratio = comparison.speedup(name)
    return f"{ratio.mean():.2f} ({ratio.min():.2f})"


def print_table(table: Table) -> None:
    """Show a table, as wide as it needs where no terminal limits it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # Redirected output would be squeezed into 80 columns.
        console = Console(highlight=False, width=WIDTH)
    console.print(table)
