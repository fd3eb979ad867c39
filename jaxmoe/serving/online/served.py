"""Where and when each request was served, and the steps of engines."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class StepLog:
    """Steps of all engines in the order of their start, then of their engines. Counts are sums over ranks.

    Engines of a decode pool are counted after the others.
    """

    engine: Int[np.ndarray, " S"]
    start: Float[np.ndarray, " S"]  # s
    seconds: Float[np.ndarray, " S"]
    tokens: Int[np.ndarray, " S"]  # of prompts and outputs
    running: Int[np.ndarray, " S"]  # requests with a seat
    waiting: Int[np.ndarray, " S"]
    kv_blocks: Int[np.ndarray, " S"]  # in use, without those that only the cache keeps


@dataclass(frozen=True, eq=False)
class Served:
    """Of each of `R` requests, in their order, where and when it was served. Times are s on the clock of arrivals.

    `token_times[token_starts[r] : token_starts[r + 1]]` are when the tokens of request `r` came; both are empty unless
    asked for.
    """

    sent: Float[np.ndarray, " R"]  # its arrival, or when a user of a closed loop came to it
    engine: Int[np.ndarray, " R"]
    rank: Int[np.ndarray, " R"]
    decode_engine: Int[np.ndarray, " R"]  # counted after the others; -1 without a decode pool, or for one token
    queued: Float[np.ndarray, " R"]  # when its engine first looked at it: at once if idle, else where a step begins
    scheduled: Float[np.ndarray, " R"]  # start of its first step
    first_token: Float[np.ndarray, " R"]
    finish: Float[np.ndarray, " R"]
    cached: Int[np.ndarray, " R"]  # tokens of the prompt that the prefix cache had at first
    preemptions: Int[np.ndarray, " R"]
    deferrals: Int[np.ndarray, " R"]  # steps at whose end it waited at a layer, see `RequestBuffering`
    token_starts: Int[np.ndarray, " starts"]  # R + 1, or none
    token_times: Float[np.ndarray, " T"]
    steps: StepLog | None = None
