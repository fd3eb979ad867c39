"""Expected loads of future windows of time: the observed windows where loads only vary, forecasts where they drift.

Where loads drift, the latest windows predict the next one best: a forecast is a mean in which a window counts less than
the one after it (exponential smoothing). Forecasts are expected to err as they did before, so the last forecast times
each earlier error, and over it, makes one expected window. An error is a factor for each expert.
"""

import numpy as np
from jaxtyping import Float

KEPT = 0.3  # what a window counts beside the one after it
DRIFT = 1.1  # times by which the mean of all windows must miss later ones by more for loads to count as drifting
FEWEST = 4  # windows that show a drift
SMALL = 1e-4  # share of an expert that changes nothing

Windows = Float[np.ndarray, "window layer expert"]


def windows_to_come(windows: Windows) -> Float[np.ndarray, "told layer expert"]:
    """Windows to place copies for: those given, or where loads drift, the last two and forecasts, as shares."""
    total = windows.sum(axis=2, keepdims=True)
    share = np.where(total > 0, windows / np.where(total > 0, total, 1), 1 / windows.shape[2])
    if len(windows) < FEWEST or _missed(share, 1.0) < DRIFT * _missed(share, KEPT):
        return windows
    told = _forecasts(share, KEPT)
    factor = (share[1:] + SMALL) / (told[:-1] + SMALL)
    made = np.concatenate([told[-1] * factor, told[-1] / factor])
    return np.concatenate([share[-2:], share[-1:], made / made.sum(axis=2, keepdims=True)])


def _forecasts(share: Windows, kept: float) -> Windows:
    """Forecast after every window, by exponential smoothing of it and those before."""
    total, weight, told = np.zeros_like(share[0]), 0.0, np.empty_like(share)
    for number, window in enumerate(share):
        total, weight = kept * total + window, kept * weight + 1
        told[number] = total / weight
    return told


def _missed(share: Windows, kept: float) -> float:
    """Mean squared error of forecasts over all later windows, relative to the forecast."""
    first = max(len(share) // 4, 1)
    later, squares = (np.cumsum(each[::-1], axis=0)[::-1][first:] for each in (share, share**2))
    told, count = _forecasts(share, kept)[first - 1 : -1], np.arange(len(share) - first, 0, -1)[:, None, None]
    return float((((squares - 2 * told * later) / count + told**2) / (told + SMALL)).sum(axis=2).mean())
