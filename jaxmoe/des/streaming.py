"""Micro-slices of experts that flow through dies: rules 1 to 5 and Algorithm 1 of expert_streaming_fse_dp, as events.

A DDR channel loads micro-slices into the buffer of a die. From there each visits the dies of its expert's trajectory,
all that hold tokens of the expert, and is computed once on every one of them.

- Rule 1: what was received is computed next, the latest first, and is sent on while it is computed.
- Rule 2: a die that received nothing computes what it has loaded, the earliest first.
- Rule 3: a slot is free when its micro-slice is computed and, where the trajectory goes on, is there.
- Rule 4: a channel loads the next micro-slice when the buffer lets it in.
- Rule 5 (`balanced`): it loads into whichever die of the trajectory has most slots free, not into its own.
- Algorithm 1 (`matched`): the next group of experts to load is the first that has tokens on an idle die; where there
  is none, the first.

A die sends one micro-slice at a time, receives one and computes one. A transfer holds every link of its path, and
lasts until the whole is there. What happens at one time happens before anything new begins; then dies take their turn
in order: all compute, all send, all load. `jaxmoe.des.buffers` says what a buffer lets in, and why nothing blocks for
ever.
"""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.buffers import BufferError, Occupancy
from jaxmoe.des.fabric import Rows
from jaxmoe.des.streaming_loop import COMPUTE, LOAD, SEND, event_loop

# What the loop is given.
Work = namedtuple("Work", "expert origin held queue first covers work following needed stops paths links")
Times = namedtuple("Times", "compute load latency send channel capacity")
Rules = namedtuple("Rules", "newest_first balanced matched in_turn")


@dataclass(frozen=True)
class Flow:
    """Micro-slices of experts in the order in which they are loaded, their routes, and the time of every step, s.

    Raises `BufferError` where a die has fewer slots than a micro-slice passes dies.
    """

    expert: Int[np.ndarray, " slice"]
    origin: Int[np.ndarray, " slice"]  # the die that loads it, or has it from the start
    held: Bool[np.ndarray, " slice"]  # on its die from the start
    group: Int[np.ndarray, " expert"]  # experts are loaded group by group, in this order
    following: Int[np.ndarray, "expert die"]  # the next die of the trajectory; of dies outside the one where it begins
    needed: Bool[np.ndarray, "expert die"]  # the trajectory
    compute: Float[np.ndarray, "expert die"]  # of one micro-slice
    load: Float[np.ndarray, " die"]
    latency: Float[np.ndarray, " channel"]  # more that the first load of a channel takes
    channel: Int[np.ndarray, " die"]
    send: Float[np.ndarray, "die die2"]
    paths: Rows  # links of die * dies + die2
    capacity: Int[np.ndarray, " die"]  # slots
    newest_first: bool = True  # else what was received waits for its turn (Fig. 4a)
    balanced: bool = False
    matched: bool = False
    in_turn: bool = False  # a group is loaded when the one before is computed

    def __post_init__(self) -> None:
        stops = self.needed.sum(axis=1)[self.expert] + ~self.needed[self.expert, self.origin]
        for at in np.flatnonzero(stops > self.capacity.min())[:1]:
            raise BufferError(
                f"a die's buffer has {self.capacity.min()} slots, but micro-slices of expert {self.expert[at]} pass "
                f"{stops[at]} dies and need as many; make the buffer larger, or the micro-slices smaller"
            )

    @cached_property
    def visits(self) -> int:
        """Computations of all micro-slices."""
        return int(self.needed.sum(axis=1)[self.expert].sum())


@dataclass(frozen=True)
class Services:
    """Recorded loads, computations and transfers of micro-slices, with their begin and end, s.

    `kind` is `LOAD`, `COMPUTE` or `SEND`. `die` is the die that computes, receives a load, or sends a transfer.
    """

    kind: Int[np.ndarray, " service"]
    die: Int[np.ndarray, " service"]
    slice: Int[np.ndarray, " service"]
    begin: Float[np.ndarray, " service"]
    end: Float[np.ndarray, " service"]
    receiver: Int[np.ndarray, " service"]  # of a transfer, else -1


@dataclass(frozen=True)
class Stream:
    """A run: seconds in all, busy seconds of channels, arrays and senders, buffers, and events counted."""

    seconds: float
    load_busy: Float[np.ndarray, " channel"]
    compute_busy: Float[np.ndarray, " die"]
    send_busy: Float[np.ndarray, " die"]
    buffers: Occupancy
    loaded: int
    sent: int
    events: int
    services: Services | None


__all__ = ["COMPUTE", "LOAD", "SEND", "Flow", "Services", "Stream", "stream"]


def _uniform(array: np.ndarray) -> np.ndarray:
    """The array in one of three forms: the loop takes many seconds to compile, and is compiled for every new form."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.require(array, kinds[array.dtype.kind], ["C_CONTIGUOUS", "WRITEABLE"])


def stream(flow: Flow, record: bool = False) -> Stream:
    """Simulate `flow` until every micro-slice is computed; with `record`, the result lists its services.

    Raises `BufferError`, with the state of the buffers, where no micro-slice can move any more.
    """
    dies = flow.needed.shape[1]
    groups = int(flow.group.max(initial=-1)) + 1
    waiting = np.flatnonzero(~flow.held)
    place = flow.group[flow.expert[waiting]] * dies + flow.origin[waiting]
    first = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=groups * dies))]).astype(np.int64)
    queue = waiting[np.argsort(place, kind="stable")]
    covers = np.zeros((groups, dies), bool)
    np.logical_or.at(covers, flow.group, flow.needed)
    work = np.bincount(flow.group[flow.expert], flow.needed.sum(axis=1)[flow.expert], groups)[:groups].astype(np.int64)
    slices = (flow.expert, flow.origin, flow.held)
    routes = (flow.following, flow.needed, flow.needed.sum(axis=1), flow.paths.start, flow.paths.items)
    seconds, done, busy, buffers, counts, numbers, moments = event_loop(
        Work(*map(_uniform, (*slices, queue, first, covers, work, *routes))),
        Times(*map(_uniform, (flow.compute, flow.load, flow.latency, flow.send, flow.channel, flow.capacity))),
        Rules(*map(bool, (flow.newest_first, flow.balanced, flow.matched, flow.in_turn))),
        len(flow.expert) + 2 * flow.visits + 1 if record else 0,
    )
    free, peak, held, _, together = buffers
    if done < flow.visits:
        used = ", ".join(
            f"{most - left} of {most} on die {die}"
            for die, (most, left) in enumerate(zip(flow.capacity, free, strict=True))
        )
        left = f"{flow.visits - done} computations are left"
        raise BufferError(f"nothing moves after {seconds:g} s and {left}; slots in use: {used}")
    channels = len(busy) - 2 * dies
    rows, spans = numbers[:, : counts[3]], moments[:, : counts[3]]
    return Stream(
        seconds=float(seconds),
        load_busy=busy[:channels],
        compute_busy=busy[channels : channels + dies],
        send_busy=busy[channels + dies :],
        buffers=Occupancy(peak, held, int(together[1])),
        loaded=int(counts[0]),
        sent=int(counts[2]),
        events=int(counts[:3].sum()),
        services=Services(rows[0], rows[1], rows[2], spans[0], spans[1], rows[3]) if record else None,
    )
