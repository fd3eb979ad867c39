"""Routers with finite buffers in virtual channels, credits and allocators, simulated cycle by cycle.

This is the input-queued router of BookSim2 (Jiang et al., "A detailed and flexible cycle-accurate network-on-chip
simulator", ISPASS 2013), written anew from its description. A *cycle* is the time of a flit on the fastest link. Every
link, and every port of a node, is a channel that ends in `num_vcs` buffers of `vc_buf_size` flits.

**Packets** are chunks, in whole flits. A node sends the packets of its port one after the other, a flit a cycle, each
into the next virtual channel in turn that is free and has room. The first flit of a packet that has come to the head of
a buffer asks for a virtual channel of its next channel; when it has one, its flits ask for the crossbar one by one, as
long as there are credits: room in the buffer they go to. A virtual channel is free again when the last flit of its
packet was sent to it. With `wormhole` that is all; with cut-through the buffer has to have room for the whole packet,
and with store-and-forward the packet asks when all of it is there.

**Steps.** In every cycle first what is on its way arrives: flits, credits, whole packets at nodes; then nodes inject;
then every router takes `internal_speedup` steps. A step matches inputs with outputs of the crossbar, and buffers with
virtual channels, both from what was known before the step, by iSLIP (McKeown, IEEE/ACM Trans. Netw. 7, 1999) with
`alloc_iters` iterations: whoever is asked grants the next in turn, or with `network_age` the packet that was injected
first, whoever asked accepts the next in turn. A flit that was let through leaves in the next step's cycle, or when its
channel is free. Its credit goes back in the cycle of the step, one a cycle for each channel, takes as long as a flit,
and can be used `credit_delay` cycles later (at a node at once). A node takes what arrives.

**Latencies** are those of the links: a hop alone takes as long as on an unbounded network, of which the steps for
virtual channel, crossbar and departure are a part and the wire is the rest. The end points' latency is shared by the
wires of both ports. Times are rounded up to cycles. Ports of a router are numbered in the order of its links, those
that routing takes first before the others, and last those of its node; turns begin with the first.

**Deadlock.** When nothing can move any more, `DeadlockError` names a circle of channels that wait for each other.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt

from jaxmoe.des.fabric import Fabric
from jaxmoe.des.router_loop import SOURCE, TASK, RouterWork, run_routers
from jaxmoe.des.router_tables import (
    NOBODY,
    PACKET,
    WORMHOLE,
    Net,
    Parameters,
    RouterError,
    channels_of,
    net_of,
    parameters_of,
)
from jaxmoe.des.tasks import TaskGraph


class DeadlockError(RouterError):
    """Channels that wait for each other in a circle, named in the message."""


@dataclass(frozen=True)
class RouterRun:
    """Result of a simulation on routers: start and finish of every task, s, and the peak of every buffer, flits.

    `record` has when every packet begins and ends to pass each server of its path, s; it is empty unless recorded.
    """

    start: Float[np.ndarray, " task"]
    finish: Float[np.ndarray, " task"]
    peak: Int[np.ndarray, "channel vc"]  # flits that a buffer held at most
    record: Float[np.ndarray, "service 2"]


def simulate_routers(fabric: Fabric, graph: TaskGraph, record: bool = False) -> RouterRun:
    """Run `graph` on the routers of `fabric`, by the rules of this module.

    Raises `RouterError` for what cannot be simulated, and `DeadlockError` where packets wait for each other for ever.
    """
    if fabric.router is None:
        raise RouterError("the network has no routers with buffers; write router.num_vcs")
    parameters = parameters_of(fabric, fabric.router)
    channels = channels_of(fabric, parameters)
    packet = _packets(fabric, graph, parameters.flit_bytes, parameters.lanes)
    _check(fabric, graph, packet, parameters)
    services = np.zeros((int(graph.chunk_hops) if record else 0, 2))
    net = net_of(fabric, parameters, channels, packet, _hops(fabric, graph, channels.of_servers()), services)
    task = _tasks(fabric, graph, parameters.cycle)
    source = np.zeros(max(channels.nodes, graph.num_nodes) * channels.lanes, SOURCE)
    source["now"] = source["target"] = source["last"] = -1
    room = np.empty(len(task) + 1), np.empty(len(task) + 1, np.int64)
    done = run_routers(net, RouterWork(task, source, graph.successor_start, graph.successor, *room))
    if done < len(task):
        raise DeadlockError(_circle(fabric, net, len(task) - done))
    start, finish = (task[name] * parameters.cycle for name in ("start", "finish"))
    peak = net.buffer["peak"].reshape(-1, parameters.num_vcs)
    return RouterRun(start, finish, peak, services * parameters.cycle)


def _packets(fabric: Fabric, graph: TaskGraph, flit_bytes: float, lanes: int) -> np.ndarray:
    """The packets of a graph's transfers, in whole flits; a computation has one that is never sent.

    The packets of a message take the ports of the node it goes to in turn, beginning with that of its source's number.
    """
    task = np.repeat(np.arange(graph.num_tasks), graph.chunks)
    packet = np.zeros(len(task), PACKET)
    sends = graph.chunks > 0
    size = graph.chunk_size[task]
    size[(np.cumsum(graph.chunks) - 1)[sends]] = graph.last_size[sends]
    packet["task"] = task
    packet["flits"] = np.maximum(np.ceil(size / flit_bytes - 1e-6), 1)
    hops = np.diff(graph.path_start)[task]
    packet["place"] = np.cumsum(hops) - hops
    if lanes > 1:
        number = np.arange(len(task)) - (np.cumsum(graph.chunks) - graph.chunks - graph.chunks_before)[task]
        source = graph.path[graph.path_start[:-1][task]] - fabric.num_links
        packet["port"] = (number + source) % lanes
    return packet


def _hops(fabric: Fabric, graph: TaskGraph, channel: Int[np.ndarray, " server"]) -> UInt[np.ndarray, "hop 3"]:
    """Channel of every hop of all paths, class of the virtual channels that it may take, its number on its path."""
    servers = len(fabric.rate)
    number = np.arange(len(graph.path)) - np.repeat(graph.path_start[:-1], np.diff(graph.path_start))
    known = np.where(graph.path < servers, channel[np.minimum(graph.path, servers - 1)], 0)
    return np.stack([known, _classes(fabric, graph), number], axis=1).astype(np.uint32)


def _classes(fabric: Fabric, graph: TaskGraph) -> Int[np.ndarray, " hop"]:
    """Class of every hop: 0 before its packet crosses the dateline of a ring, 1 from there to the ring's end, 2 at
    ports.

    Raises `RouterError` on a network without rings.
    """
    path = graph.path
    if fabric.router is None or not fabric.router.dateline:
        return np.zeros(len(path), np.int64)
    if fabric.rings is None:
        raise RouterError("router.dateline is true, but only a torus and a ring have one; write false")
    links = fabric.num_links
    ring = np.where(path < links, fabric.rings[np.minimum(path, links - 1)], links)
    dimension = np.where(ring < 0, -1 - ring, ring)
    begins = np.ones(len(path), bool)  # of each stretch along one dimension
    begins[1:] = dimension[1:] != dimension[:-1]
    begins[graph.path_start[:-1][np.diff(graph.path_start) > 0]] = True
    crossed = np.cumsum(ring < 0)
    before = np.maximum.accumulate(np.where(begins, crossed - (ring < 0), 0))
    return np.where(path >= links, 2, np.minimum(crossed - before, 1))


def _tasks(fabric: Fabric, graph: TaskGraph, cycle: float) -> np.ndarray:
    """Records `TASK` of all tasks: packets that a node sends, computations, and barriers, which do neither."""
    servers, task, acts = len(fabric.rate), np.zeros(graph.num_tasks, TASK), graph.chunks > 0
    first = np.zeros(graph.num_tasks, np.int64)
    first[acts] = graph.path[graph.path_start[:-1][acts]]
    computes = acts & (first >= servers)
    task["computes"], task["work"] = computes, np.where(computes, graph.last_size / cycle, 0)
    task["node"] = np.where(computes, first - servers, first - fabric.num_links)
    task["packets"] = task["undelivered"] = np.where(computes, 0, graph.chunks)
    task["first_packet"] = np.cumsum(graph.chunks) - graph.chunks
    task["path"] = graph.path_start[:-1]
    task["awaits"] = graph.predecessors
    task["following"] = -1
    return task


def _check(fabric: Fabric, graph: TaskGraph, packet: np.ndarray, parameters: Parameters) -> None:
    """Refuse tasks that are no messages from port to port, and packets that do not fit a buffer."""
    if graph.background is not None:
        raise RouterError("background transfers need unbounded buffers; write null for router.num_vcs")
    moves = (graph.chunks > 0) & (graph.path_start[:-1] < graph.path_start[1:])
    first, last = graph.path[graph.path_start[:-1][moves]], graph.path[graph.path_start[1:][moves] - 1]
    network = first < len(fabric.rate)
    ejection = fabric.num_links + fabric.num_nodes
    starts = (first >= fabric.num_links) & (first < ejection)
    if (network & ~(starts & (last >= ejection))).any():
        raise RouterError(
            "trees of routers that copy or add up need unbounded buffers: choose an exchange without a tree, or write "
            "null for router.num_vcs"
        )
    longest, size = int(packet["flits"].max(initial=0)), parameters.vc_buf_size
    if parameters.switching != WORMHOLE and longest > size:
        raise RouterError(
            f"router.vc_buf_size is {size} flits, but a packet has {longest}: with this switching it has to fit a "
            f"buffer; write {longest} or more, lower router.chunk_B, or write wormhole for router.switching"
        )


def _circle(fabric: Fabric, net: Net, left: int) -> str:
    """A circle of buffers whose first packets wait for each other, in words."""
    buffer, waits = net.buffer, {}
    for b in np.flatnonzero(buffer["count"] > 0).tolist():
        waits[b] = int(buffer["to"][b]) if buffer["to"][b] != NOBODY else _busy(net, b)
    seen: dict[int, int] = {}
    at = next(iter(waits))
    while at not in seen:
        seen[at] = len(seen)
        at = waits[at]
    circle = [b for b, place in seen.items() if place >= seen[at]]
    names = []
    for b in [*circle, circle[0]]:
        start, end = fabric.ends[buffer["channel"][b]]
        names.append(f"link {start} to {end} (virtual channel {buffer['vc'][b]})")
    return (
        f"deadlock with {left} tasks unfinished: {' waits for '.join(names)}. Set router.dateline to true on a torus "
        "or ring, take other paths, or write null for router.num_vcs"
    )


def _busy(net: Net, b: int) -> int:
    """The buffer whose packets are in the way of the first packet of `b`, which waits for a virtual channel."""
    behind = int(net.outs[net.buffer["at"][b], net.buffer["output"][b]]) * net.vcs
    allowed = int(net.classes[net.path[net.buffer["onward"][b], 1]])
    return next(behind + vc for vc in range(net.vcs) if allowed >> vc & 1 and net.buffer["count"][behind + vc] > 0)
