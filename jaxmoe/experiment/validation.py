"""How well the analytic model agrees with the event simulator on the same batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.experiment.clock import Report, StageClock
from jaxmoe.experiment.evaluation import Replay, replay, score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.latency import LayerTime

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
    """One strategy at one batch size, in the model and in the simulator, both with the same schedule."""

    strategy: Strategy
    tokens: int
    model: LayerTime
    replay: Replay

    @property
    def simulated(self) -> LayerTime:
        return self.replay.time


def run_trial(inputs: Inputs, strategy: Strategy, tokens: int, clock: StageClock, report: Report) -> Trial:
    """Evaluate and replay a strategy on batches of so many tokens."""
    batches = inputs.first_batches(inputs.batches_of(tokens))
    with clock.stage("evaluate"):
        model = score(inputs, strategy, batches, as_simulated=True)
    stage = f"simulate {strategy.name}, {tokens} tokens"
    with clock.stage("simulate"):
        simulated = replay(inputs, strategy, batches, lambda done, total: report(stage, done, total))
    return Trial(strategy, tokens, model, simulated)


def validation_report(layer_ids: Sequence[int], trials: list[Trial]) -> dict[str, Any]:
    """All trials by strategy and batch size, and the agreement over all of them. Times are seconds."""
    strategies: dict[str, dict[str, Any]] = {}
    for trial in trials:
        placement = trial.strategy.placement
        note = {"fits": trial.strategy.fits, "note": trial.strategy.note}
        note |= {"mode": placement.mode, "exchange": [*placement.exchange]}
        entry = strategies.setdefault(trial.strategy.name, note | {"batch_tokens": {}})
        entry["batch_tokens"][str(trial.tokens)] = _trial_report(layer_ids, trial)
    return {"strategies": strategies, "agreement": trials_agreement(trials)}


def _trial_report(layer_ids: Sequence[int], trial: Trial) -> dict[str, Any]:
    count = trial.simulated.total.shape[1]
    return {
        "mean": _both(trial, ()),
        "agreement": trials_agreement([trial]),
        "layers": [
            {"layer_id": layer, "batches": [_both(trial, (row, column)) for column in range(count)]}
            for row, layer in enumerate(layer_ids)
        ],
    }


def _both(trial: Trial, at: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Seconds of model and simulator for the batch of a layer, or as means over all."""

    def times(of: LayerTime) -> dict[str, float]:
        return {f"{name}_s": float(getattr(of, name)[at].mean()) for name in STAGES}

    free = {"free_running_s": float(trial.replay.free_running[at].mean())}
    return {"model": times(trial.model), "simulated": times(trial.simulated) | free}


def trials_agreement(trials: list[Trial]) -> dict[str, Figures]:
    """Of communication and of the total, over all these trials."""
    return {
        what: agreement(
            np.concatenate([np.ravel(getattr(trial.model, what)) for trial in trials]),
            np.concatenate([np.ravel(getattr(trial.simulated, what)) for trial in trials]),
        )
        for what in COMPARED
    }
