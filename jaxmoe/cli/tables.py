"""Tables for people, on standard output."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.session import messages
from jaxmoe.experiment.comparison import Comparison
from jaxmoe.experiment.strategies import TUNED
from jaxmoe.experiment.validation import Figures, Trial, trials_agreement
from jaxmoe.plotting.style import time_unit

WIDTH = 180  # where there is no terminal to tell


def print_comparison(comparison: Comparison, title: str) -> None:
    """Mean over layers of every strategy."""
    factor, unit = time_unit(max(float(score.mean.mean()) for score in comparison.scores.values()))
    table = Table(title=f"{title} [{unit}]".replace("[", r"\["))
    table.add_column("strategy", no_wrap=True)
    table.add_column("exchange")
    for column in ("dispatch", "compute", "combine", "total", "p95", "simulated\n(model there)"):
        table.add_column(column, justify="right")
    table.add_column("best exchange")
    table.add_column("total under\nthe best", justify="right")
    tuned = TUNED in comparison.scores
    if tuned:
        table.add_column("tuned faster by\nmean (least)", justify="right")
    for name in comparison.strategies:
        own = exchange_names(comparison.strategies[name].placement.exchange)
        row = [f"{seconds * factor:.4g}" for seconds in _means(comparison, name)]
        simulated, best = _simulated(comparison, name, factor), _best(comparison, name, factor)
        gain = [_gain(comparison, name)] if tuned else []
        table.add_row(_marked(comparison, name), own, *row, simulated, *best, *gain)
    print_table(table)


def exchange_names(names: Sequence[str]) -> str:
    """The exchange of all layers, or each with the number of layers that it has, the most used first."""
    counted = Counter(names).most_common()
    return "\n".join(name if len(counted) == 1 else f"{name} in {count}" for name, count in counted)


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
                notes.append(
                    f"{name} is faster than {TUNED} on {ahead.sum()} of {ahead.size} layers, each under its best "
                    "exchange"
                )
    return notes


def print_agreement(trials: list[Trial]) -> None:
    """How model and simulator agree, by strategy and batch size, and how long it takes without barriers."""
    table = Table(title="model against event simulation")
    table.add_column("strategy", no_wrap=True)
    table.add_column("exchange")
    for column in ("tokens", "communication\nR2", "mean abs\nerror, %", "total\nR2", "mean abs\nerror, %"):
        table.add_column(column, justify="right")
    table.add_column("simulated total\nwithout barriers", justify="right")
    for trial in trials:
        exchange = exchange_names(trial.strategy.placement.exchange)
        table.add_row(escape(trial.strategy.name), exchange, str(trial.tokens), *_figures([trial]))
    table.add_row("all", "", "", *_figures(trials))
    print_table(table)


def _figures(trials: list[Trial]) -> tuple[str, ...]:
    """R2 and error of communication and of the total, and the part of the time without barriers."""
    texts = [text for figures in trials_agreement(trials).values() for text in _agreement_cells(figures)]
    free = sum(float(trial.replay.free_running.sum()) for trial in trials)
    whole = sum(float(trial.simulated.total.sum()) for trial in trials)
    return *texts, f"{100 * free / whole:.1f} %"


def _agreement_cells(figures: Figures) -> tuple[str, str]:
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return "-" if r2 is None else f"{r2:.6f}", "-" if error is None else f"{error:.3f}"


def _means(comparison: Comparison, name: str) -> list[float]:
    score = comparison.scores[name]
    return [float(np.mean(part)) for part in (score.dispatch, score.compute, score.combine, score.total)] + [
        float(score.p95.mean())
    ]


def _simulated(comparison: Comparison, name: str, factor: float) -> str:
    """The simulator's mean, and the model's on the same batches: they are fewer than those of other columns."""
    simulated, model = comparison.replays[name].time.total.mean(), comparison.replayed[name].total.mean()
    return f"{simulated * factor:.4g} ({model * factor:.4g})"


def _best(comparison: Comparison, name: str, factor: float) -> tuple[str, str]:
    """The best exchange of a strategy, and its mean time under it; none where it is not comparable."""
    if not comparison.strategies[name].comparable:
        return "-", "-"
    best = comparison.best(name)
    return exchange_names(best.exchange), f"{best.mean.mean() * factor:.4g}"


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
