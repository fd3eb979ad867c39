"""State of routers with finite buffers, as arrays, from the description of network and traffic.

A *buffer* is one virtual channel of a channel, with the number `channel * num_vcs + vc`. A set of buffers, of outputs
or of virtual channels of a router is a mask of bits; an input has the bit of its first buffer. A round-robin pointer is
the bit of the first whose turn it is.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.fabric import Fabric
from jaxmoe.errors import InputError
from jaxmoe.hardware import Router

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
    buffer: np.ndarray
    ring: np.ndarray  # packets that a buffer is for, in their order [buffer, place]
    channel: np.ndarray
    router: np.ndarray
    outs: np.ndarray  # channel of every output [router, port]
    bits: np.ndarray  # buffer of every bit [router, bit]
    inputs: np.ndarray  # bit of the input that a bit is at
    ready: np.ndarray  # buffers that can send to an output [router, port]
    waiting: np.ndarray  # buffers that want a virtual channel of an output [router, port, class]
    classes: np.ndarray  # virtual channels that a class may take
    packet: np.ndarray
    path: np.ndarray  # channel, class, and number on its path of every hop [hop, 3]
    wheel: np.ndarray  # by cycle modulo its length: three counts, then three lists [slot, 3 + 3 width]
    record: np.ndarray  # begin and end of services [place, 2]; of no length: not recorded
    granted: np.ndarray  # room for a step: what is granted to every bit; 0 before and after
    matched: np.ndarray  # room for a step: buffers that send


MOST_BITS = 62  # buffers at the inputs of a router


class RouterError(InputError):
    """Raised for routers that cannot be simulated, and for traffic that they cannot carry."""


class Channels(NamedTuple):
    """All channels: links, then injection ports, then ejection ports, in cycles."""

    source: Int[np.ndarray, " channel"]  # router where it starts; -1: a node
    sink: Int[np.ndarray, " channel"]
    period: Float[np.ndarray, " channel"]  # for a flit
    wire: Int[np.ndarray, " channel"]
    links: int
    nodes: int
    lanes: int  # ports of each kind of a node

    @property
    def injection(self) -> int:
        return self.links

    @property
    def ejection(self) -> int:
        return self.links + self.nodes * self.lanes

    def of_servers(self) -> Int[np.ndarray, " server"]:
        """The first channel of every server of the fabric."""
        ports = self.links + np.arange(2 * self.nodes) * self.lanes
        return np.concatenate([np.arange(self.links), ports])


@dataclass(frozen=True)
class Parameters:
    """The numbers of a `Router`, whole where they count something. Raises `RouterError` where they cannot be."""

    num_vcs: int
    vc_buf_size: int
    internal_speedup: float
    credit_delay: int
    alloc_iters: int
    lanes: int
    cycle: float  # s
    flit_bytes: float
    switching: int
    oldest: bool  # the packet that was injected first goes first
    dateline: bool

    def __post_init__(self) -> None:
        for name in ("num_vcs", "vc_buf_size", "alloc_iters", "lanes"):
            if getattr(self, name) < 1:
                raise RouterError(f"router.{name} is {getattr(self, name)}; a router needs at least 1")
        if not self.internal_speedup >= 1:
            raise RouterError(f"router.internal_speedup is {self.internal_speedup:g}; a crossbar needs at least 1")


def parameters_of(fabric: Fabric, router: Router) -> Parameters:
    """Parameters of the routers of a fabric. A cycle is the time of a flit on the fastest link or port, s."""
    lanes = round(float(router.ports_per_node))
    links = fabric.num_links
    fastest = max(fabric.rate[:links].max(initial=0), fabric.rate[links:].max(initial=0) / lanes)
    return Parameters(
        num_vcs=round(float(router.num_vcs)),
        vc_buf_size=round(float(router.vc_buf_size)),
        internal_speedup=float(router.internal_speedup),
        credit_delay=round(float(router.credit_delay)),
        alloc_iters=round(float(router.alloc_iters)),
        lanes=lanes,
        cycle=float(router.flit_bytes) / fastest,
        flit_bytes=float(router.flit_bytes),
        switching=(WORMHOLE if router.wormhole else CUT_THROUGH) if fabric.cut_through else STORE_AND_FORWARD,
        oldest=router.priority == "network_age",
        dateline=router.dateline,
    )


def channels_of(fabric: Fabric, parameters: Parameters) -> Channels:
    """Channels of a fabric. Raises `RouterError` where a latency is less than what routers take."""
    links, nodes, lanes, cycle = fabric.num_links, fabric.num_nodes, parameters.lanes, parameters.cycle
    ejection = fabric.latency[links + nodes :]
    begun = math.floor(2 / parameters.internal_speedup)  # cycles from a flit's arrival to its departure, if alone
    wire = _cycles(fabric.latency[:links], cycle) - begun
    endpoint = int(_cycles(ejection, cycle).max(initial=0)) + 1 - begun
    if links and wire.min() < 1:
        least = _nanoseconds((begun + 1) * cycle)
        raise RouterError(
            f"latency_ns of a link is {_nanoseconds(fabric.latency[:links].min())}; routers with buffers take at least "
            f"{begun + 1} cycles of {_nanoseconds(cycle)} ns for a hop: write {least} or more for link, uplink and "
            "border, or lower router.flit_B"
        )
    if endpoint < 2:
        least = _nanoseconds((begun + 1) * cycle)
        raise RouterError(
            f"router.endpoint_latency_ns is {_nanoseconds(ejection.max())}; with buffers it "
            f"takes at least {begun + 1} cycles of {_nanoseconds(cycle)} ns to get in and out: write {least} or more, "
            "or lower router.flit_B"
        )
    node = np.repeat(np.arange(nodes), lanes)
    nowhere = np.full(nodes * lanes, -1)
    rate = np.concatenate([fabric.rate[:links], np.repeat(fabric.rate[links:], lanes) / lanes])
    return Channels(
        source=np.concatenate([fabric.ends[:, 0], nowhere, node]),
        sink=np.concatenate([fabric.ends[:, 1], node, nowhere]),
        period=np.maximum(parameters.flit_bytes / rate / cycle, 1),
        wire=np.concatenate([wire, np.repeat([endpoint - endpoint // 2, endpoint // 2], nodes * lanes)]),
        links=links,
        nodes=nodes,
        lanes=lanes,
    )


def _cycles(seconds: Float[np.ndarray, " each"], cycle: float) -> Int[np.ndarray, " each"]:
    """Whole cycles, rounded up but for what 32 bits may have added."""
    return np.ceil(seconds / cycle - 1e-4).astype(np.int64)


def _nanoseconds(seconds: float) -> str:
    return f"{seconds * 1e9:.4g}"


def net_of(
    fabric: Fabric, parameters: Parameters, channels: Channels, packet: np.ndarray, path: np.ndarray, record: np.ndarray
) -> Net:
    """The arrays of the loop: empty routers, and what is to pass them. Raises `RouterError` for routers too large."""
    vcs, count = parameters.num_vcs, len(channels.source)
    ins, outs, ports = _ports(fabric, channels)
    most = ins.shape[1]
    if most * vcs > MOST_BITS:
        fewer = f"write {MOST_BITS // most} or fewer, or null" if most <= MOST_BITS else "write null"
        raise RouterError(
            f"router.num_vcs is {vcs} at a router with {most} ports; {MOST_BITS} virtual channels at the inputs of a "
            f"router are the most: {fewer} for unbounded buffers"
        )
    every, half = (1 << vcs) - 1, (1 << vcs // 2) - 1
    classes = np.array([half, every & ~half, every] if parameters.dateline else [every], np.int64)
    in_port, out_port = np.zeros((2, count), np.int64)
    for port in range(most):
        there = ports > port
        in_port[ins[there, port]] = out_port[outs[there, port]] = port
    return Net(
        vcs=vcs,
        iterations=parameters.alloc_iters,
        speedup=parameters.internal_speedup,
        switching=parameters.switching,
        oldest=parameters.oldest,
        width=count,
        injection=channels.injection,
        ejection=channels.ejection,
        lanes=channels.lanes,
        buffer=_empty_buffers(parameters, channels, in_port),
        ring=np.zeros((count * vcs, min(parameters.vc_buf_size, max(len(packet), 1)) + 1), np.uint32),
        channel=_idle_channels(channels, parameters.credit_delay, out_port, every),
        router=_idle_routers(ports * vcs),
        outs=outs.astype(np.uint32),
        bits=(ins[:, :, None] * vcs + np.arange(vcs)).reshape(len(ins), -1).astype(np.uint32),
        inputs=(np.arange(most * vcs) // vcs * vcs).astype(np.uint8),
        ready=np.zeros((len(outs), most), np.int64),
        waiting=np.zeros((len(outs), most, len(classes)), np.int64),
        classes=classes,
        packet=packet,
        path=path,
        wheel=np.zeros((_slots(parameters, channels), 3 + 3 * count), np.uint32),
        record=record,
        granted=np.zeros(most * vcs, np.int64),
        matched=np.zeros(most, np.uint32),
    )


def _empty_buffers(parameters: Parameters, channels: Channels, in_port: Int[np.ndarray, " channel"]) -> np.ndarray:
    vcs = parameters.num_vcs
    buffer = np.zeros(len(in_port) * vcs, BUFFER)
    buffer["to"] = buffer["user"] = NOBODY
    buffer["credits"] = parameters.vc_buf_size
    buffer["channel"], buffer["vc"] = np.divmod(np.arange(len(buffer)), vcs)
    buffer["at"] = np.maximum(channels.sink[buffer["channel"]], 0)
    buffer["bit"] = in_port[buffer["channel"]] * vcs + buffer["vc"]
    return buffer


def _idle_channels(
    channels: Channels, credit_delay: int, out_port: Int[np.ndarray, " channel"], free: int
) -> np.ndarray:
    channel = np.zeros(len(channels.source), CHANNEL)
    for name in ("source", "sink", "wire", "period"):
        channel[name] = getattr(channels, name)
    to_node = channels.sink < 0  # which takes all at once
    channel["brings"] = np.where(to_node, RETURNS, ARRIVALS)
    channel["after"] = np.where(to_node, 2 * channels.wire + credit_delay, channels.wire)
    channel["credit"] = channels.wire + np.where(channels.source < 0, 0, credit_delay)
    channel["out_port"], channel["free"], channel["last_vc"] = out_port, free, -1
    return channel


def _idle_routers(bits: Int[np.ndarray, " router"]) -> np.ndarray:
    router = np.zeros(len(bits), ROUTER)
    router["in_bits"] = router["out_bits"] = bits
    return router


def _slots(parameters: Parameters, channels: Channels) -> int:
    """Cycles that anything is on its way at most, to a power of two."""
    queued = 0.0  # behind others for its channel, or a credit
    if parameters.internal_speedup > 1 or channels.period.max() > 1:
        queued = channels.period.max() * parameters.num_vcs * parameters.vc_buf_size
    return 1 << math.ceil(math.log2(2 * channels.wire.max() + parameters.credit_delay + queued + 4))


def _ports(
    fabric: Fabric, channels: Channels
) -> tuple[Int[np.ndarray, "router port"], Int[np.ndarray, "router port"], Int[np.ndarray, " router"]]:
    """Channels of inputs and outputs, an input beside the output the other way, the node's last; and how many."""
    order = fabric.port_order
    own = np.arange(channels.nodes * channels.lanes)
    out = np.concatenate([order, channels.ejection + own])
    into = np.concatenate([fabric.opposite[order], channels.injection + own])
    router = channels.source[out]
    by_router = np.argsort(router, kind="stable")
    ports = np.bincount(router)
    port = np.arange(len(out)) - np.repeat(np.cumsum(ports) - ports, ports)
    ins, outs = np.zeros((2, len(ports), ports.max()), np.int64)
    ins[router[by_router], port], outs[router[by_router], port] = into[by_router], out[by_router]
    return ins, outs, ports
