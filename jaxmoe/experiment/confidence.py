"""How sure a measured gain is: an interval by bootstrap over windows, and how many tokens would settle it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri, stdtrit

LEVEL = 0.95  # of intervals
RESAMPLES = 4000


@dataclass(frozen=True)
class SampledGain:
    """Gain of one choice over another in each window, a part of the time, from a sample of so many `tokens`.

    `bar`: the gain that is worth acting on. `least`: tokens without which it is not sure, whatever the windows say:
    those of less than a step are more uneven than steps are.
    """

    windows: Float[np.ndarray, " window"]
    tokens: float
    bar: float
    seed: int = 0
    least: float = 0.0

    @property
    def mean(self) -> float:
        return float(self.windows.mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The mean's interval, by bootstrap over windows.

        Percentiles are widened by what Student's t is wider than the normal distribution, as those of few windows are
        too narrow (Hesterberg 2015, What Teachers Should Know About the Bootstrap). Of a single window nothing is
        known.
        """
        count = len(self.windows)
        if count < 2:
            return -np.inf, np.inf
        drawn = np.random.default_rng(self.seed).integers(count, size=(RESAMPLES, count))
        tail = (1 - LEVEL) / 2
        ends = np.quantile(self.windows[drawn].mean(axis=1), (tail, 1 - tail))
        wider = np.sqrt(count / (count - 1)) * stdtrit(count - 1, tail) / ndtri(tail)
        low, high = self.mean + (ends - self.mean) * wider
        return float(low), float(high)

    @property
    def is_worth_it(self) -> bool:
        return self.mean > self.bar

    @property
    def is_sure(self) -> bool:
        """Whether enough tokens leave no doubt: a gain worth having is above 0, and any other below the bar."""
        low, high = self.interval
        return self.tokens >= self.least and (low > 0 if self.is_worth_it else high < self.bar)

    @property
    def confidence(self) -> str:
        return "high" if self.is_sure else "low"

    @property
    def tokens_to_settle(self) -> float:
        """About how many tokens of such a sample would make it sure: intervals shrink with the root of their number.

        Infinite where the gain is just the one that would have to be excluded.
        """
        low, high = self.interval
        excluded, end = (0.0, low) if self.is_worth_it else (self.bar, high)
        distance = abs(self.mean - excluded)
        return max(self.tokens * (abs(end - self.mean) / distance) ** 2, self.least) if distance else np.inf

    @property
    def told_interval(self) -> str:
        low, high = self.interval
        return f"{LEVEL:.0%} interval {low:.1%} to {high:.1%}"

    @property
    def told_confidence(self) -> str:
        """In words, with the number of tokens that would settle a doubt, to two digits."""
        if self.is_sure:
            return "high confidence"
        needed = self.tokens_to_settle
        settled = "no number settles it" if np.isinf(needed) else f"about {float(f'{needed:.2g}'):,.0f} would settle it"
        return f"low confidence: the sample has {self.tokens:,.0f} tokens, {settled}"

    def report(self) -> dict[str, Any]:
        """For `summary.json`; `None` for what a sample does not tell."""
        ends = [None if np.isinf(end) else end for end in self.interval]
        needed = None if self.is_sure or np.isinf(self.tokens_to_settle) else self.tokens_to_settle
        return {
            "sampled_gain": {"mean": self.mean, "interval": ends, "level": LEVEL},
            "confidence": self.confidence,
            "tokens": self.tokens,
            "tokens_to_settle": needed,
        }


def whole_steps(
    windows: Float[np.ndarray, "window layer expert"], choices: float, least: int = 4
) -> Float[np.ndarray, "window2 layer expert"]:
    """Neighbouring windows together, so that each holds the `choices` of a step on average, but `least` of them.

    Loads of less than a step vary more than those of a step, and make every placement look worse than it is.
    """
    steps = int(windows.sum(axis=(0, 2)).max() // choices)
    parts = np.array_split(windows, min(max(steps, least), len(windows)))
    return np.stack([part.sum(axis=0) for part in parts])
