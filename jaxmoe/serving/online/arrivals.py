"""Requests drawn at random, and the same requests at another rate.

Gaps between arrivals are gamma variables of mean 1/rate; their standard deviation is `variation` times that, so 1 is a
Poisson process and more comes in bursts. Lengths are lognormal, of a mean and a relative standard deviation.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.errors import InputError
from jaxmoe.serving.online.requests import Requests


class Lengths(NamedTuple):
    """Mean tokens of prompts and of outputs, and the standard deviation of each over its mean."""

    prompt: float | int
    output: float | int
    prompt_variation: float = 0.0
    output_variation: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Int[np.ndarray, " R"], Int[np.ndarray, " R"]]:
        """Tokens of so many prompts and outputs, at least 1 each."""
        return (
            _lognormal(self.prompt, self.prompt_variation, count, rng),
            _lognormal(self.output, self.output_variation, count, rng),
        )


@dataclass(frozen=True)
class Prefixes:
    """Texts that prompts begin with, such as system prompts: `count` of `tokens`, popular by Zipf's law of `skew`."""

    count: int
    tokens: int
    skew: float = 1.0

    def draw(self, prompts: int, rng: np.random.Generator) -> Int[np.ndarray, " R"]:
        """Which text each of so many prompts begins with."""
        popularity = np.arange(1, self.count + 1) ** -float(self.skew)
        return rng.choice(self.count, prompts, p=popularity / popularity.sum())


def gaps(rate: float, variation: float, count: int, rng: np.random.Generator) -> Float[np.ndarray, " R"]:
    """Seconds between so many arrivals and the ones before; all alike without `variation`."""
    if variation == 0:
        return np.full(count, 1 / rate)
    return rng.gamma(variation**-2, variation**2 / rate, count)


def drawn(
    rate: float,
    variation: float,
    count: int,
    lengths: Lengths,
    seed: int,
    prefixes: Prefixes | None = None,
    topics: int = 1,
) -> Requests:
    """`count` requests at a mean `rate`, 1/s; the first comes at 0. Topics of requests are drawn evenly."""
    times, sizes, texts, subjects = (np.random.default_rng([seed, part]) for part in range(4))
    arrival = np.concatenate([[0.0], np.cumsum(gaps(rate, variation, count - 1, times))])
    return with_prefixes(
        Requests(arrival, *lengths.draw(count, sizes), topic=subjects.integers(topics, size=count)), prefixes, texts
    )


def with_prefixes(requests: Requests, prefixes: Prefixes | None, rng: np.random.Generator) -> Requests:
    """The requests with a common text, one block, before each prompt."""
    if prefixes is None:
        return requests
    count = len(requests)
    return replace(
        requests,
        prompt=requests.prompt + prefixes.tokens,
        prefix_starts=np.arange(count + 1),
        prefix_blocks=prefixes.draw(count, rng),
        prefix_tokens=prefixes.tokens,
    )


def mean_rate(requests: Requests) -> float:
    """Requests that come after the first, over the time in which they do, 1/s; infinite where all come at once."""
    span = float(requests.arrival[-1] - requests.arrival[0])
    return (len(requests) - 1) / span if span > 0 else np.inf


def at_rate(requests: Requests, rate: float) -> Requests:
    """Requests in the same order at another mean rate, 1/s: all gaps are longer or shorter alike.

    Raises `InputError` where all come at once, which has no rate to change.
    """
    own = mean_rate(requests)
    if not np.isfinite(own):
        raise InputError(
            f"serving.arrivals.rate_per_s is {rate:g}, but all {len(requests)} requests come at once; leave it out, or "
            "give requests that come one after another"
        )
    return replace(requests, arrival=requests.arrival * (own / rate))


def check_lengths(requests: Requests, most: int, key: str) -> None:
    """Raise `InputError` where a prompt and its output are more than `most` tokens together; `key` would allow more."""
    tokens = requests.prompt + requests.output
    longer = np.flatnonzero(tokens > most)
    if longer.size:
        row = int(longer[0])
        raise InputError(
            f"arrivals: request {row} has a prompt of {requests.prompt[row]} and an output of {requests.output[row]} "
            f"tokens; expected {most} together at most, and {longer.size} of {len(requests)} have more. Leave them "
            f"out, or raise {key}"
        )


def _lognormal(mean: float | int, variation: float, count: int, rng: np.random.Generator) -> Int[np.ndarray, " R"]:
    spread = np.log1p(variation**2)  # the variance of the logarithm
    drawn = rng.lognormal(np.log(mean) - spread / 2, np.sqrt(spread), count)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)
