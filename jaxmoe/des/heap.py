"""A heap of pending events, in two arrays, for compiled code: times, and of one time codes."""

from typing import no_type_check

from numba import njit

# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def push(times, codes, size, time, code):
    """Put (time, code) in the heap of `size` events, and return its new size."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times[above] < time or (times[above] == time and codes[above] < code):
            break
        times[at], codes[at] = times[above], codes[above]
        at = above
    times[at], codes[at] = time, code
    return size + 1


@njit(cache=True, nogil=True)
@no_type_check
def drop_first(times, codes, size):
    """Take the first event out of the heap of `size` events, and return its new size."""
    size -= 1
    time, code = times[size], codes[size]
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        right = below + 1
        if right < size and (
            times[right] < times[below] or (times[right] == times[below] and codes[right] < codes[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and code < codes[below]):
            break
        times[at], codes[at] = times[below], codes[below]
        at = below
    times[at], codes[at] = time, code
    return size
