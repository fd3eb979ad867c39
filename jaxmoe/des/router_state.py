"""State of routers with finite buffers: records of buffers, channels, routers and packets, and `Net`, which has all.

A *buffer* is one virtual channel of a channel, with the number `channel * num_vcs + vc`. A set of buffers, of outputs
or of virtual channels of a router is a mask of bits; an input has the bit of its first buffer. A round-robin pointer is
the bit of the first whose turn it is.
"""

from typing import Any, NamedTuple

import numpy as np

BUFFER = np.dtype(
    [
        ("count", np.int32),  # flits in it
        ("left", np.int32),  # flits that its first packet has still to send
        ("to", np.uint32),  # the buffer that its first packet is sent to, or NOBODY
        ("user", np.uint32),  # the buffer that sends to it, or NOBODY, as for a node
        ("credits", np.int32),  # flits that may be sent to it
        ("first", np.int32),  # place of its first packet in its ring
        ("held", np.int32),  # packets that it is or will be for
        ("grant", np.int32),  # pointer among the buffers that ask for it
        ("accept", np.int32),  # pointer among the buffers that it asks for
        ("output", np.uint32),  # that its first packet wants
        ("onward", np.uint32),  # where on its path that is
        ("peak", np.int32),  # most flits that it ever held
        ("channel", np.uint32),
        ("vc", np.int32),
        ("bit", np.int32),  # at its router
        ("at", np.uint32),  # its router
    ]
)
CHANNEL = np.dtype(
    [
        ("sink", np.int32),  # router where it ends, -1: a node
        ("source", np.int32),
        ("out_port", np.uint32),  # at the router where it starts
        ("wire", np.int32),  # cycles
        ("brings", np.int32),  # what a flit on it brings about: its arrival, or from a node at once its credit
        ("after", np.int32),  # cycles until then
        ("credit", np.int32),  # cycles of a credit back over it
        ("turn", np.int32),  # pointer of its input among its virtual channels
        ("accept", np.int32),  # pointer of its input among outputs
        ("grant", np.int32),  # pointer of its output among inputs
        ("last_vc", np.int32),  # that a node used
        ("free", np.int64),  # virtual channels that no packet is sent to
        ("credit_at", np.int64),  # when it can carry the next credit
        ("period", np.float64),  # cycles that it takes for a flit
        ("free_at", np.float64),  # when it can take the next
    ],
    align=True,
)
ROUTER = np.dtype(
    [
        ("sends", np.int64),  # outputs that any of its buffers can send to, or could in the last step
        ("waits", np.int64),  # outputs that any of its buffers wants a virtual channel of
        ("in_bits", np.int64),
        ("out_bits", np.int64),
    ]
)
PACKET = np.dtype(
    [
        ("flits", np.int32),
        ("hop", np.int32),  # where on its path its head is
        ("task", np.uint32),
        ("port", np.int32),  # of the node that it goes to
        ("born", np.int64),  # cycle of its injection
        ("place", np.int64),  # of its services in the record
    ]
)
NOBODY = np.uint32(2**32 - 1)
ARRIVALS, RETURNS, TAILS = range(3)  # what is on its way: flits to buffers, credits of buffers, last flits of packets
WORMHOLE, CUT_THROUGH, STORE_AND_FORWARD = range(3)


class Net(NamedTuple):
    """Numbers of all routers, then the arrays of the loop."""

    vcs: int
    iterations: int
    speedup: float
    switching: int
    oldest: bool
    width: int  # of a list of the wheel
    injection: int  # the first injection channel
    ejection: int
    lanes: int  # ports of each kind that a node has
    buffer: Any
    ring: Any  # packets that a buffer is for, in their order [buffer, place]
    channel: Any
    router: Any
    outs: Any  # channel of every output [router, port]
    bits: Any  # buffer of every bit [router, bit]
    inputs: Any  # bit of the input that a bit is at
    ready: Any  # buffers that can send to an output [router, port]
    waiting: Any  # buffers that want a virtual channel of an output [router, port, class]
    classes: Any  # virtual channels that a class may take
    packet: Any
    path: Any  # channel, class, and number on its path of every hop [hop, 3]
    wheel: Any  # by cycle modulo its length: three counts, then three lists [slot, 3 + 3 width]
    record: Any  # begin and end of services [place, 2]; of no length: not recorded
    granted: Any  # room for a step: what is granted to every bit; 0 before and after
    matched: Any  # room for a step: buffers that send
