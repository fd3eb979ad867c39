"""Subjects that drift: what users ask about over time, which experts that loads, and what EPLB makes of it."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.errors import InputError
from jaxmoe.methods.moentwine.migration import moves_between
from jaxmoe.placement.eplb import counted
from jaxmoe.serving.online.requests import Requests

SPREAD = 1.5  # standard deviation of the logarithm of a subject's popularity

_moves = jax.jit(moves_between)
Shares = Float[np.ndarray, "layer expert"]
Slots = Int[np.ndarray, "layer slot"]


class Subjects(NamedTuple):
    """Shares of a layer's choices that fall on each expert, by subject, from two sets of questions of other text."""

    planned: Float[np.ndarray, "subject layer expert"]  # what a plan is made from
    served: Float[np.ndarray, "subject layer expert"]  # what it serves


def read_subjects(planned: Path, served: Path) -> Subjects:
    """The subjects that both files of loads have."""
    files = [_by_subject(path) for path in (planned, served)]
    common = sorted(files[0].keys() & files[1].keys())
    if not common:
        raise InputError(f"{planned} and {served} have no subject in common; give files of one benchmark")
    both = [np.stack([each[name] for name in common]) for each in files]
    return Subjects(*(each / each.sum(axis=2, keepdims=True) for each in both))


def _by_subject(path: Path) -> dict[str, Float[np.ndarray, "layer expert"]]:
    """Choices of each subject, whatever came of its questions."""
    found: dict[str, Float[np.ndarray, "layer expert"]] = {}
    with np.load(path) as arrays:
        for name, counts in zip(arrays["group_name"], arrays["counts_by_group"], strict=True):
            subject = str(name).partition("/")[0]
            found[subject] = found.get(subject, 0.0) + counts.astype(float)
    return found


def popularity(
    subjects: int, windows: int, window_s: float, drift_s: float, rng: np.random.Generator
) -> Float[np.ndarray, "window subject"]:
    """Part of the requests of each window that are about each subject.

    Logarithms before they are made to sum to 1 are independent Ornstein-Uhlenbeck processes, of standard deviation
    `SPREAD`; after `drift_s` their correlation is 1/e.
    """
    keeps = np.exp(-window_s / drift_s)
    log = np.empty((windows, subjects))
    log[0] = rng.normal(size=subjects)
    for at in range(1, windows):
        log[at] = keeps * log[at - 1] + np.sqrt(1 - keeps**2) * rng.normal(size=subjects)
    parts = np.exp(SPREAD * log)
    return parts / parts.sum(axis=1, keepdims=True)


def tokens_of(
    requests: Requests, parts: Float[np.ndarray, "window subject"], window_s: float, start: float, seed: int
) -> Float[np.ndarray, "window subject"]:
    """Tokens of the requests that come in each window from `start` on, by the subject that each draws from `parts`."""
    rng = np.random.default_rng(seed)
    window = ((requests.arrival - start) // window_s).astype(int)
    drawn = (parts.cumsum(axis=1)[window] < rng.random(len(requests))[:, None]).sum(axis=1)
    tokens = np.zeros_like(parts)
    np.add.at(tokens, (window, np.minimum(drawn, parts.shape[1] - 1)), requests.prompt + requests.output)
    return tokens


def loads(tokens: Float[np.ndarray, " subject"], shares: Float[np.ndarray, "subject layer expert"]) -> Shares:
    """Shares of each expert over so many tokens of each subject."""
    return np.tensordot(tokens / tokens.sum(), shares, 1)


def imbalance(shares: Shares, held: Slots, devices: int) -> float:
    """Choices of the most loaded device over those of a mean one, a mean over layers."""
    copies = counted(held, shares.shape[1])
    of_slot = np.take_along_axis(shares / copies, held, axis=1)
    return float((of_slot.reshape(len(held), devices, -1).sum(axis=2).max(axis=1) * devices).mean())


def experts_moved(before: Slots, after: Slots, devices: int) -> tuple[float, float]:
    """Experts that come to a device which did not have them, and the most that one device sends or receives."""
    slots = [np.asarray(each).reshape(len(each), devices, -1) for each in (before, after)]
    traffic = np.asarray(_moves(*slots, 1.0 - np.eye(devices), None).traffic)
    return float(traffic.sum()), float(max(traffic.sum(axis=0).max(), traffic.sum(axis=1).max()))
