"""How well the analytic model agrees with the event simulator on the same batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.experiment.clock import Report, StageClock
from jaxmoe.experiment.evaluation import Replay, Score, replay, score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy

Figures = dict[str, float | int | None]
STAGES = ("dispatch", "compute", "combine", "total")
COMPARED = ("communication", "total")


def agreement(model_s: np.ndarray, simulated_s: np.ndarray) -> Figures:
    """R2 of the prediction itself (no line is fitted), and its mean and largest absolute error in percent.

    `None` where it has no meaning: R2 of equal times, errors of times that are all 0.
    """
    model, simulated = np.ravel(model_s), np.ravel(simulated_s)
    spread = ((simulated - simulated.mean()) ** 2).sum()
    some = simulated > 0
    error = 100 * np.abs(model[some] / simulated[some] - 1)
    return {
        "points": model.size,
        "r2": float(1 - ((simulated - model) ** 2).sum() / spread) if spread > 0 else None,
        "mean_abs_error_percent": float(error.mean()) if error.size else None,
        "max_abs_error_percent": float(error.max()) if error.size else None,
    }


@dataclass(frozen=True)
class Trial:
    """One strategy at one batch size, in the model and in the simulator."""

    strategy: Strategy
    tokens: int
    model: Score
    simulated: Replay


def run_trial(inputs: Inputs, strategy: Strategy, tokens: int, clock: StageClock, report: Report) -> Trial:
    """Evaluate and replay a strategy on batches of so many tokens."""
    batches = inputs.first_batches(inputs.batches_of(tokens))
    with clock.stage("evaluate"):
        model = score(inputs, strategy, batches)
    stage = f"simulate {strategy.name}, {tokens} tokens"
    with clock.stage("simulate"):
        simulated = replay(inputs, strategy, batches, lambda done, total: report(stage, done, total))
    return Trial(strategy, tokens, model, simulated)


def validation_report(layer_ids: Sequence[int], trials: list[Trial]) -> dict[str, Any]:
    """All trials by strategy and batch size, and the agreement over all of them. Times are seconds."""
    strategies: dict[str, dict[str, Any]] = {}
    for trial in trials:
        note = {"fits": trial.strategy.fits, "note": trial.strategy.note, "mode": trial.strategy.placement.mode}
        entry = strategies.setdefault(trial.strategy.name, note | {"batch_tokens": {}})
        entry["batch_tokens"][str(trial.tokens)] = _trial_report(layer_ids, trial)
    return {"strategies": strategies, "agreement": trials_agreement(trials)}


def _trial_report(layer_ids: Sequence[int], trial: Trial) -> dict[str, Any]:
    count = trial.simulated.total.shape[1]
    return {
        "mean": {"model": _means(trial.model, STAGES), "simulated": _means(trial.simulated, (*STAGES, "free_running"))},
        "agreement": trials_agreement([trial]),
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


def trials_agreement(trials: list[Trial]) -> dict[str, Figures]:
    """Of communication and of the total, over all these trials."""
    return {
        what: agreement(
            np.concatenate([np.ravel(getattr(trial.model, what)) for trial in trials]),
            np.concatenate([np.ravel(getattr(trial.simulated, what)) for trial in trials]),
        )
        for what in COMPARED
    }
