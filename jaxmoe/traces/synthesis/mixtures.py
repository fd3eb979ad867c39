"""Requests as they arrived, and how often experts are chosen while a mixture of scenarios drifts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.trace import TraceError


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order in which they arrive: when, s, and tokens of prompt and answer, all [request]."""

    seconds: Float[np.ndarray, " request"]
    prompt: Int[np.ndarray, " request"]
    answer: Int[np.ndarray, " request"]

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.prompt) == len(self.answer) > 0:
            raise TraceError("arrivals need one time, prompt and answer for each of at least one request")
        if (np.diff(self.seconds) < 0).any() or min(self.prompt.min(), self.answer.min()) < 0:
            raise TraceError("arrivals must be in order of time, with prompts and answers of no less than 0 tokens")


def read_arrivals(path: Path) -> Arrivals:
    """Read `arrival_s`, `context_tokens` and `generated_tokens` of an `.npz`. Raises `TraceError` without them."""
    arrays = read_arrays(path)
    names = ("arrival_s", "context_tokens", "generated_tokens")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise TraceError(f"{path}: has no {', '.join(missing)}; expected the arrays {', '.join(names)}")
    return Arrivals(*(arrays[name] for name in names))


def drawn_counts(
    shares: Float[np.ndarray, "scenario layer expert"],
    mixture: Float[np.ndarray, "iteration scenario"],
    choices: int,
    seed: int,
) -> Int[np.ndarray, "iteration layer expert"]:
    """Choices of every expert in iterations of `choices` choices each, drawn one by one from the mixture's shares.

    That a token's choices are different experts is left out: it makes counts a little more even than this.
    """
    expected = np.einsum("is,sle->ile", mixture, shares)
    expected /= expected.sum(axis=2, keepdims=True)
    return np.random.default_rng((seed, 2)).multinomial(choices, expected).astype(np.int32)
