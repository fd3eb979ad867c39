"""Token buffering over time: a request waits at a layer whose expert would be loaded for few tokens.

Source: expert_streaming_fse_dp IV-A and Algorithm 2; `methods.expert_streaming.buffering` has it for closed batches. A
request that waits keeps its seat, its keys and values and what it has computed, and goes on at that layer in the next
step it takes part in, with the tokens of others. A slack limits how often in all: once for so many of its passes.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxmoe.errors import InputError
from jaxmoe.serving.online.engine import Fleet
from jaxmoe.serving.online.requests import Requests

NEVER = 2**31  # tokens: no answer is as long


@dataclass(frozen=True, eq=False)
class RequestBuffering:
    """Experts that tokens choose, from a trace, and when a request waits.

    Token `p` of request `r`, of prompt and output, chooses `experts[(first[r] + p) % tokens]`; -1 is no expert. With a
    `slack` of 0.1, ten tokens of output let a request wait once (N_threshold, 1 / slack as a whole number), and with 0
    none ever waits. Waits that were not taken add up, as in Algorithm 2, so one pass may have several. A request waits
    where one of its experts has fewer than `least_tokens` (theta_min) in the step, if it has a wait left. Who reads a
    prompt does not wait: that pass is none of many. Who goes on takes nothing from the token budget, so others may
    begin a pass in its place. Raises `InputError` for a slack that is not from 0 to 1.
    """

    experts: Int[np.ndarray, "tokens layers top_k"]
    first: Int[np.ndarray, " R"]
    num_experts: int
    slack: float
    least_tokens: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.slack <= 1:
            raise InputError(f"buffering.slack is {self.slack:g}; expected 0 to 1, the part of passes that may wait")

    @property
    def passes(self) -> int:
        """Tokens of output after which a request may wait once more; 0 where it never may."""
        return min(round(1 / self.slack), NEVER) if self.slack else 0

    @property
    def identity(self) -> bytes:
        """All that decides who waits, as bytes."""
        rules = repr((self.num_experts, self.passes, self.least_tokens)).encode()
        return self.experts.tobytes() + self.first.tobytes() + rules

    def check(self, requests: Requests, fleet: Fleet) -> None:
        """Raise `InputError` for engines whose ranks would have to wait for each other, and other requests."""
        ranks = max(fleet.engine.ranks, fleet.decode.engine.ranks if fleet.decode else 1)
        if ranks > 1:
            raise InputError(
                f"engine.ranks is {ranks}; expected 1 with buffering, whose requests wait for each other's experts on "
                "all dies. Take more engines in place of ranks"
            )
        if len(self.first) != len(requests):
            raise InputError(
                f"buffering.first has {len(self.first)} rows; expected the {len(requests)} of the requests, so draw "
                "them for these"
            )
