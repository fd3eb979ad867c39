"""A heap of pending events, in two arrays, for compiled code: times, and of one time codes."""

from typing import no_type_check

from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

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


# Arrays whose references are not counted.
#
# A compiled loop that reaches its arrays through a tuple counts a reference up and down, atomically, at every look into
# the tuple. In a loop of small steps that takes most of the time: 34 of 35 parts in `streaming_loop`.


@intrinsic
@no_type_check
def uncounted(context, value):
    """Views of the arrays in `value`, a tuple of any depth, without reference counts: compiled code reads them faster.

    A view does not keep its memory alive, so the caller has to hold the arrays themselves until the last use.
    """

    @no_type_check
    def bare(context, builder, kind, value):
        if isinstance(kind, types.BaseTuple):
            parts = [bare(context, builder, each, builder.extract_value(value, at)) for at, each in enumerate(kind)]
            return context.make_tuple(builder, kind, parts)
        if not isinstance(kind, types.Array):
            return value
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()

    @no_type_check
    def build(context, builder, signature, arguments):
        return bare(context, builder, signature.args[0], arguments[0])

    return value(value), build
