"""How well the analytic model agrees with the event simulator."""

import numpy as np

Figures = dict[str, float | int | None]


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


def agreement_text(figures: Figures) -> str:
    """Both figures for people."""
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return ", ".join(
        ["R2 without meaning" if r2 is None else f"R2 = {r2:.6f}"]
        + ([] if error is None else [f"mean absolute error {error:.2f} %"])
    )
