"""What `validate` finds: model and simulator on the same batches, and how far they are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.cli.agreement import Figures, agreement
from jaxmoe.cli.replay import Replay
from jaxmoe.cli.scoring import Score
from jaxmoe.cli.strategies import Strategy

STAGES = ("dispatch", "compute", "combine", "total")
COMPARED = ("communication", "total")


@dataclass(frozen=True)
class Trial:
    """One strategy at one batch size, in the model and in the simulator."""

    strategy: Strategy
    tokens: int
    model: Score
    simulated: Replay


def validation_report(layer_ids: Sequence[int], trials: list[Trial]) -> dict[str, Any]:
    """All trials by strategy and batch size, and the agreement over all of them. Times are seconds."""
    strategies: dict[str, dict[str, Any]] = {}
    for trial in trials:
        note = {"fits": trial.strategy.fits, "note": trial.strategy.note, "mode": trial.strategy.placement.mode}
        entry = strategies.setdefault(trial.strategy.name, note | {"batch_tokens": {}})
        entry["batch_tokens"][str(trial.tokens)] = _trial_report(layer_ids, trial)
    return {"strategies": strategies, "agreement": _agreement(trials)}


def agreement_rows(trials: list[Trial]) -> list[tuple[str, ...]]:
    """Lines of a table: strategy, tokens, R2 and error of communication and of the total, time without barriers."""
    rows = [(trial.strategy.name, str(trial.tokens), *_figures([trial])) for trial in trials]
    return [*rows, ("all", "", *_figures(trials))]


def _figures(trials: list[Trial]) -> tuple[str, ...]:
    texts = [text for figures in _agreement(trials).values() for text in _agreement_cells(figures)]
    free, whole = (sum(float(getattr(t.simulated, name).sum()) for t in trials) for name in ("free_running", "total"))
    return *texts, f"{100 * free / whole:.1f} %"


def _agreement_cells(figures: Figures) -> tuple[str, str]:
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return "-" if r2 is None else f"{r2:.6f}", "-" if error is None else f"{error:.3f}"


def _trial_report(layer_ids: Sequence[int], trial: Trial) -> dict[str, Any]:
    count = trial.simulated.total.shape[1]
    return {
        "mean": {"model": _means(trial.model, STAGES), "simulated": _means(trial.simulated, (*STAGES, "free_running"))},
        "agreement": _agreement([trial]),
        "layers": [
            {"layer_id": layer, "batches": [_batch_report(trial, row, column) for column in range(count)]}
            for row, layer in enumerate(layer_ids)
        ],
    }


def _means(times: Score | Replay, names: Sequence[str]) -> dict[str, float]:
    return {f"{name}_s": float(getattr(times, name).mean()) for name in names}


def _batch_report(trial: Trial, row: int, column: int) -> dict[str, dict[str, float]]:
    def times(of: Score | Replay, names: Sequence[str]) -> dict[str, float]:
        return {f"{name}_s": float(getattr(of, name)[row, column]) for name in names}

    return {"model": times(trial.model, STAGES), "simulated": times(trial.simulated, (*STAGES, "free_running"))}


def _agreement(trials: list[Trial]) -> dict[str, Figures]:
    return {
        what: agreement(
            np.concatenate([np.ravel(getattr(trial.model, what)) for trial in trials]),
            np.concatenate([np.ravel(getattr(trial.simulated, what)) for trial in trials]),
        )
        for what in COMPARED
    }
