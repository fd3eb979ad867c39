"""What requests look like: how long they are, how much of them is prompt, and how their topic moves."""

from dataclasses import dataclass

import numpy as np

from jaxmoe.traces.trace import DECODE, PREFILL, TraceError


@dataclass(frozen=True)
class Requests:
    """Requests to deal from, in the order of their recording. Raises `TraceError` for parts that do not fit.

    `length` in tokens, int [request]; `prompt` how many of them are prefill, int [request], or `None` where not
    known; `topics` the topic of every stretch of `window` tokens, int [request, stretch], of which a request uses
    as many as it needs; `drift` in [0, 1] is how far dealing keeps to the recorded order: 0 shuffles the deck, so
    the mixture of topics is the same all along; 1 keeps it, so the mixture drifts over time as it was recorded.
    """

    length: np.ndarray
    prompt: np.ndarray | None
    topics: np.ndarray
    window: int
    drift: float

    def __post_init__(self) -> None:
        requests = len(self.length)
        if self.length.ndim != 1 or requests == 0 or self.length.min() < 1:
            raise TraceError("a process needs requests of at least one token each")
        if self.topics.ndim != 2 or len(self.topics) != requests or self.topics.min(initial=0) < 0:
            raise TraceError(f"topics has shape {self.topics.shape}, expected [{requests}, stretches] from 0 up")
        if self.window < 1 or self.topics.shape[1] * self.window < self.length.max():
            raise TraceError(f"topics of {self.topics.shape[1]} x {self.window} tokens do not cover every request")
        if self.prompt is not None:
            if self.prompt.shape != self.length.shape:
                raise TraceError(f"prompt has shape {self.prompt.shape}, expected one number for each request")
            if ((self.prompt < 0) | (self.prompt > self.length)).any():
                raise TraceError("prompt holds a number of tokens that its request does not have")
        if not 0 <= self.drift <= 1:
            raise TraceError(f"drift is {self.drift}, expected a number from 0 to 1")

    def deal(self, tokens: int, seed: int) -> "Deal":
        """Requests for this many tokens; the last is cut. The deck is dealt whole before it is dealt again."""
        if tokens < 1:
            raise TraceError(f"tokens is {tokens}, expected at least 1")
        rng = np.random.default_rng((seed, 0))
        deck, place = len(self.length), np.arange(len(self.length)) / len(self.length)
        rounds = -(-tokens // int(self.length.sum()))
        order = [np.argsort(self.drift * place + (1 - self.drift) * rng.random(deck)) for _ in range(rounds)]
        card = np.concatenate(order)
        ends = np.cumsum(self.length[card])
        card = card[: int(np.searchsorted(ends, tokens)) + 1]
        length = self.length[card].copy()
        length[-1] -= length.sum() - tokens
        return Deal(self, card, length)


@dataclass(frozen=True)
class Deal:
    """Requests dealt: `card` says which of the deck, int [request]; `length` how many tokens of it, int [request]."""

    requests: Requests
    card: np.ndarray
    length: np.ndarray

    @property
    def seq_start(self) -> np.ndarray:
        """The first token of every request."""
        return np.cumsum(self.length) - self.length

    def topic(self, request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The topic of tokens, given by their request and their position in it."""
        return self.requests.topics[self.card[request], position // self.requests.window]

    def phase(self, request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The phase of tokens, prefill where nothing is known, int8."""
        prompt = self.requests.prompt
        if prompt is None:
            return np.full(request.shape, PREFILL, np.int8)
        return np.where(position < prompt[self.card[request]], PREFILL, DECODE).astype(np.int8)

    def phases(self) -> np.ndarray | None:
        """The phase of every token, int8 [token]; `None` where nothing is known."""
        if self.requests.prompt is None:
            return None
        request = np.repeat(np.arange(len(self.length)), self.length)
        return self.phase(request, np.arange(len(request)) - self.seq_start[request])
