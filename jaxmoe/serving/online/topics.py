"""Topics of requests that drift: what users ask about over time, and which experts that loads."""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.errors import InputError
from jaxmoe.serving.online.requests import Requests

Shares = Float[np.ndarray, "layer expert"]  # of a layer's choices
TopicShares = Float[np.ndarray, "topic layer expert"]


def read_topics(path: Path) -> dict[str, Shares]:
    """Shares of each topic of a file of load counts by group, `counts_by_group` [group, layer, expert].

    A group's topic is its name up to a slash. Raises `InputError` for a file without groups, or that cannot be read.
    """
    try:
        with np.load(path) as arrays:
            names, counts = arrays["group_name"], arrays["counts_by_group"]
        if counts.ndim != 3 or len(names) != len(counts) or not len(names):
            raise ValueError(f"there are {len(names)} names of groups beside counts of shape {counts.shape}")
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise InputError(
            f"{path}: cannot be read as loads by topic ({error}); expected an .npz with group_name and counts_by_group "
            "[group, layer, expert]"
        ) from None
    found: dict[str, Shares] = {}
    for name, own in zip(names, counts, strict=True):
        topic = str(name).partition("/")[0]
        found[topic] = found.get(topic, 0.0) + own.astype(float)
    for topic, own in found.items():
        if not (own.sum(axis=1) > 0).all():
            raise InputError(f"{path}: counts_by_group has a layer without a choice for {topic}; leave that topic out")
    return {topic: own / own.sum(axis=1, keepdims=True) for topic, own in found.items()}


def made_up_topics(topics: int, layers: int, experts: int, spread: float, seed: int) -> TopicShares:
    """Topics whose experts are log-normally popular, each by itself; `spread` is of the logarithm."""
    popularity = np.exp(spread * np.random.default_rng(seed).normal(size=(topics, layers, experts)))
    return popularity / popularity.sum(axis=2, keepdims=True)


def popularity(
    topics: int, windows: int, window_s: float, drift_s: float, spread: float, rng: np.random.Generator
) -> Float[np.ndarray, "window topic"]:
    """Part of the requests of each window that are about each topic.

    Logarithms before they are made to sum to 1 are independent Ornstein-Uhlenbeck processes, of standard deviation
    `spread`; after `drift_s` their correlation is 1/e.
    """
    keeps = np.exp(-window_s / drift_s)
    log = np.empty((windows, topics))
    log[0] = rng.normal(size=topics)
    for at in range(1, windows):
        log[at] = keeps * log[at - 1] + np.sqrt(1 - keeps**2) * rng.normal(size=topics)
    parts = np.exp(spread * log)
    return parts / parts.sum(axis=1, keepdims=True)


def drawn_topics(
    window: Int[np.ndarray, " R"], parts: Float[np.ndarray, "window topic"], rng: np.random.Generator
) -> Int[np.ndarray, " R"]:
    """The topic of each request, drawn from the parts of the window in which it comes."""
    drawn = (parts.cumsum(axis=1)[window] < rng.random(len(window))[:, None]).sum(axis=1)
    return np.minimum(drawn, parts.shape[1] - 1)


def windows_of(requests: Requests, window_s: float, start: float = 0.0) -> Int[np.ndarray, " R"]:
    """The window, counted from `start` on, in which each request comes."""
    return ((requests.arrival - start) // window_s).astype(int)


def tokens_of(
    requests: Requests, window: Int[np.ndarray, " R"], topics: int, windows: int
) -> Float[np.ndarray, "window topic"]:
    """Tokens of the requests that come in each window, by topic."""
    tokens = np.zeros((windows, topics))
    np.add.at(tokens, (window, requests.topic), requests.prompt + requests.output)
    return tokens


def loads(tokens: Float[np.ndarray, " topic"], shares: TopicShares) -> Shares:
    """Shares of each expert over so many tokens of each topic."""
    return np.tensordot(tokens / tokens.sum(), shares, 1)
