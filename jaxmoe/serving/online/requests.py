"""Requests to serve: when each arrives, how long it is, and which blocks of its prompt others share."""

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.errors import InputError


def _none() -> Int[np.ndarray, " B"]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Requests:
    """`R` requests in the order in which they arrive.

    `prefix_blocks[prefix_starts[r] : prefix_starts[r + 1]]` name the blocks of `prefix_tokens` tokens that the prompt
    of request `r` begins with: equal names at equal places are equal text. Without them no prompt shares text.
    Raises `InputError` for requests out of order, empty prompts and empty outputs.
    """

    arrival: Float[np.ndarray, " R"]  # s, from the first
    prompt: Int[np.ndarray, " R"]  # tokens
    output: Int[np.ndarray, " R"]  # tokens, at least 1
    prefix_starts: Int[np.ndarray, " starts"] = field(default_factory=_none)  # R + 1, or none
    prefix_blocks: Int[np.ndarray, " B"] = field(default_factory=_none)
    prefix_tokens: int = 512
    topic: Int[np.ndarray, " topics"] = field(default_factory=_none)  # of its gating; empty: all the same

    def __post_init__(self) -> None:
        late = np.flatnonzero(np.diff(self.arrival) < 0)
        if late.size:
            row = int(late[0]) + 1
            raise InputError(
                f"arrivals: request {row} comes at {self.arrival[row]:g} s, before request {row - 1} at "
                f"{self.arrival[row - 1]:g} s; expected ascending times, so sort the file by arrival"
            )
        for name, lengths in (("prompt", self.prompt), ("output", self.output)):
            empty = np.flatnonzero(lengths < 1)
            if empty.size:
                row = int(empty[0])
                raise InputError(
                    f"arrivals: request {row} has {name} {lengths[row]}; expected 1 token or more, so leave it out"
                )

    def __len__(self) -> int:
        return len(self.arrival)

    def window(self, start: int, stop: int) -> "Requests":
        """Requests from one to before another, on a clock that starts with the first."""
        own, starts = slice(start, stop), self.prefix_starts[start : stop + 1]
        return replace(
            self,
            arrival=self.arrival[own] - self.arrival[start],
            prompt=self.prompt[own],
            output=self.output[own],
            prefix_starts=starts - starts[0] if len(starts) else starts,
            prefix_blocks=self.prefix_blocks[starts[0] : starts[-1]] if len(starts) else self.prefix_blocks,
            topic=self.topic[own],
        )
