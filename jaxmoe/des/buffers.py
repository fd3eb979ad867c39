"""Finite buffers with back-pressure: an item takes a slot of the buffer that it enters, or waits until it may.

**No deadlock.** What has still `ahead` places to go after this one is let in only where more than `ahead` slots are
free. So the item with the fewest places ahead can always move: all others where it wants to go have at least as many
ahead, and the last of them to come in left so many slots free. Every place needs as many slots as the longest way has
places. This is the structured buffer pool of Merlin and Schweitzer, "Deadlock avoidance in store-and-forward
networks", IEEE Trans. Commun. 28 (1980), with slots counted.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.errors import InputError


class BufferError(InputError):
    """Raised for buffers that are too small, or in which no item can move any more; the message has their occupancy."""


@dataclass(frozen=True)
class Occupancy:
    """Use of finite buffers over a run: peak and slot-seconds of every buffer, and the peak of all together."""

    peak: Int[np.ndarray, " place"]  # most slots in use at once
    held: Float[np.ndarray, " place"]  # slots in use, integrated over time, slot s
    peak_together: int  # most slots in use at once in all buffers together

    def mean(self, seconds: float) -> Float[np.ndarray, " place"]:
        """Mean slots in use of every buffer over a run of `seconds`."""
        return self.held / seconds if seconds > 0 else np.zeros_like(self.held)


# The state lies in arrays: free slots, most slots in use, slot-seconds, and seconds of the last change of each place;
# and slots in use and most of them in all places together.


@njit(inline="always")
@no_type_check
def empty_buffers(capacity):
    """State of buffers with so many slots each, all free."""
    places = len(capacity)
    return capacity.copy(), np.zeros(places, np.int64), np.zeros(places), np.zeros(places), np.zeros(2, np.int64)


@njit(inline="always")
@no_type_check
def admits(buffers, place, ahead):
    """Whether a buffer has room for an item that has `ahead` more buffers to pass after this one."""
    return buffers[0][place] > ahead


@njit(inline="always")
@no_type_check
def take_slot(buffers, capacity, place, now):
    """Take a slot of buffer `place` at time `now`, s."""
    free, peak, held, since, together = buffers
    held[place] += (capacity[place] - free[place]) * (now - since[place])
    since[place] = now
    free[place] -= 1
    together[0] += 1
    peak[place] = max(peak[place], capacity[place] - free[place])
    together[1] = max(together[1], together[0])


@njit(inline="always")
@no_type_check
def give_slot(buffers, capacity, place, now):
    """Free a slot of buffer `place` at time `now`, s."""
    free, _, held, since, together = buffers
    held[place] += (capacity[place] - free[place]) * (now - since[place])
    since[place] = now
    free[place] += 1
    together[0] -= 1
