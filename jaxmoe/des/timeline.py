"""A recorded run in the trace-event format of Chrome: when every link, port and node was busy, and with which task.

Trace viewers (chrome://tracing, Perfetto) show it as rows of slices. One process has a row for each directed link.
Every node is a process with rows for what it computes, for the messages it sends and receives, and for its ports
where it has any. Sent and received messages are marks, slices without duration: one when the message begins to leave
and one when it is there whole. An arrow leads from the first to the second by way of the first slice on each link.
Counters show the busy links and the bytes that are under way.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.event_loop import ServiceRecord, SimulatedRun
from jaxmoe.des.fabric import Fabric

Event = dict[str, Any]

DECIMALS = 6  # of times in µs
RESOLUTION = 1e-12  # s: the last of them
COMPUTES, SENDS, RECEIVES = "compute", "sends", "receives"


@dataclass(frozen=True)
class Slices:
    """Spans of time in which a server works for one task without a pause, in order of their begin, causes first.

    Servers have the numbers of `ServiceRecord`. `begin` and `end` are s; `size` is B of transfers, s of computations.
    Services that take no time are left out, and pauses, which no server of the machine serves.
    """

    task: Int[np.ndarray, " slice"]
    server: Int[np.ndarray, " slice"]
    begin: Float[np.ndarray, " slice"]
    end: Float[np.ndarray, " slice"]
    size: Float[np.ndarray, " slice"]


class Row(NamedTuple):
    """A row of the viewer. Process 0 is all links, process n + 1 is node n."""

    process: int
    name: str


class Message(NamedTuple):
    """A transfer of `size` B that begins at `start` and is there at `finish`, µs. Those of a run are numbered."""

    number: int
    stage: str
    source: int
    destination: int
    size: float
    start: float
    finish: float

    @property
    def name(self) -> str:
        return f"{self.stage} {self.source} -> {self.destination}"


Place = dict[str, int]
"""The process and the thread of a row, under the names that events have for them."""


def timeline_events(
    run: SimulatedRun, fabric: Fabric, link_ends: Int[np.ndarray, "link 2"], stage: Sequence[str] | None = None
) -> list[Event]:
    """Events of a recorded run on `fabric`: first those that describe rows, then the others in order of time.

    `link_ends` are the vertices at which links start and end; switches come after the nodes. `stage` says of every
    task what it is part of; without it there are transfers and computations. Raises `ValueError` for a run without
    a record, and for links or stages that are not the run's.
    """
    _check(run, fabric, link_ends, stage)
    stages = _plain_stages(run, fabric) if stage is None else stage
    servers = server_rows(fabric, link_ends)
    places = _places(servers, fabric)
    slices, messages = run_slices(run, fabric), _messages(run, fabric, link_ends, stages)
    # Of events at one time, causes come first and an arrow after its slice: viewers bind it to the one they saw last.
    timed = [
        *_send_events(messages.values(), places),
        *_slice_events(slices, messages, stages, [places[row] for row in servers]),
        *_receive_events(messages.values(), places),
        *_counters(slices, messages.values(), fabric.num_links),
    ]
    return [*_descriptions(places), *sorted(timed, key=lambda event: event["ts"])]


def server_rows(fabric: Fabric, link_ends: Int[np.ndarray, "link 2"]) -> list[Row]:
    """The row of every server: links, ports, and what nodes compute."""
    nodes = fabric.num_nodes

    def name(vertex: int) -> str:
        return str(vertex) if vertex < nodes else f"switch {vertex - nodes}"

    links = [Row(0, f"link {name(start)} -> {name(end)}") for start, end in link_ends.tolist()]
    ports = [Row(node + 1, kind) for kind in _port_kinds(fabric) for node in range(nodes)]
    return [*links, *ports, *(Row(node + 1, COMPUTES) for node in range(nodes))]


def run_slices(run: SimulatedRun, fabric: Fabric) -> Slices:
    """Slices of a recorded run: services of one task by one server that follow without a pause count as one.

    Raises `ValueError` for a run without a record.
    """
    services = _services(run)
    known = services.server < len(fabric.rate) + fabric.num_nodes
    lasting = np.flatnonzero((services.end > services.begin) & known)
    order = lasting[np.argsort(services.server[lasting], kind="stable")]  # those of one server in order of time
    task, server = services.task[order], services.server[order]
    begin, end, size = services.begin[order], services.end[order], _sizes(services, fabric)[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(task) != 0) | (np.diff(server) != 0) | (begin[1:] - end[:-1] >= RESOLUTION)
    first = np.flatnonzero(new)
    last = np.append(first, len(order))[1:] - 1
    by_time = np.lexsort((order[first], begin[first]))
    slices = (task[first], server[first], begin[first], end[last], np.add.reduceat(size, first))
    return Slices(*(column[by_time] for column in slices))


def _check(
    run: SimulatedRun, fabric: Fabric, link_ends: Int[np.ndarray, "link 2"], stage: Sequence[str] | None
) -> None:
    if len(run.link_busy) != len(fabric.rate):
        raise ValueError(f"the run has {len(run.link_busy)} links and ports, but the fabric {len(fabric.rate)}")
    if len(link_ends) != fabric.num_links:
        raise ValueError(f"there are ends of {len(link_ends)} links, but the fabric has {fabric.num_links}")
    if stage is not None and len(stage) != len(run.start):
        raise ValueError(f"there are {len(stage)} stages for {len(run.start)} tasks")


def _services(run: SimulatedRun) -> ServiceRecord:
    if run.services is None:
        raise ValueError("the run has no record of its services; simulate it with record=True")
    return run.services


def _port_kinds(fabric: Fabric) -> list[str]:
    """Kinds of ports that the fabric has; every node has one port of each kind."""
    ports = {"injection port": fabric.injection, "ejection port": fabric.ejection}
    return [kind for kind, first in ports.items() if first is not None]


def _sizes(services: ServiceRecord, fabric: Fabric) -> Float[np.ndarray, " service"]:
    """Size of every service: B of transfers, s of computations.

    Sizes follow from how long the first server with a limit took: cut-through may hold later ones longer.
    """
    speed = np.append(fabric.rate, 1.0)[np.minimum(services.server, len(fabric.rate))]
    unlimited = np.isinf(speed)
    amount = (services.end - services.begin) * np.where(unlimited, 0.0, speed)
    chunk = services.task * (services.chunk.max(initial=0) + 1) + services.chunk
    order = np.lexsort((unlimited, chunk))
    _, first, of = np.unique(chunk[order], return_index=True, return_inverse=True)
    size = np.empty(len(amount))
    size[order] = amount[order[first]][of]
    # A chunk in the background may be served in pieces: each has its part of what its server served.
    _, where = np.unique(chunk * (len(fabric.rate) + fabric.num_nodes) + services.server, return_inverse=True)
    pieces = np.bincount(where)
    if (pieces == 1).all():
        return size
    whole = np.bincount(where, services.end - services.begin)[where]
    divided = (pieces[where] > 1) & (whole > 0)
    served = np.bincount(where, amount)[where]
    return np.where(divided, served * (services.end - services.begin) / np.where(divided, whole, 1), size)


def _plain_stages(run: SimulatedRun, fabric: Fabric) -> list[str]:
    services = _services(run)
    stages = np.full(len(run.start), "transfer")
    stages[services.task[services.server >= len(fabric.rate)]] = COMPUTES
    return stages.tolist()


def _messages(
    run: SimulatedRun, fabric: Fabric, link_ends: Int[np.ndarray, "link 2"], stages: Sequence[str]
) -> dict[int, Message]:
    """The messages by their tasks. They come from where their first server starts, and go where their last one ends."""
    services = _services(run)
    port_nodes = np.arange(len(fabric.rate) - fabric.num_links) % fabric.num_nodes
    starts, ends = np.concatenate([link_ends, np.stack([port_nodes, port_nodes], axis=1)]).T
    moved = np.flatnonzero(services.server < len(fabric.rate))
    tasks, first, of = np.unique(services.task[moved], return_index=True, return_inverse=True)
    source_server = services.server[moved[first]]
    _, last = np.unique(services.task[moved[::-1]], return_index=True)
    destination_server = services.server[moved[::-1][last]]
    leaves = services.server[moved] == source_server[of]
    size = np.bincount(of, _sizes(services, fabric)[moved] * leaves).astype(float)
    source, destination = starts[source_server], ends[destination_server]
    start, finish = _microseconds(run.start[tasks]), _microseconds(run.finish[tasks])
    columns = (tasks, source, destination, _legible(size), start, finish)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {task: Message(number, stages[task], *rest) for number, (task, *rest) in enumerate(rows)}


def _places(servers: Sequence[Row], fabric: Fabric) -> dict[Row, Place]:
    """Where every row is: links, then node by node what it computes, sends and receives, and its ports."""
    computing = len(fabric.rate)
    marks = [Row(node + 1, name) for node in range(fabric.num_nodes) for name in (SENDS, RECEIVES)]
    rows = sorted([*servers[computing:], *marks, *servers[:computing]], key=lambda row: row.process)
    # Some viewers know threads by their number alone, or treat 0 as idle time: so numbers differ and begin above it.
    return {row: {"pid": row.process + 1, "tid": fabric.num_nodes + 2 + index} for index, row in enumerate(rows)}


def _descriptions(places: Mapping[Row, Place]) -> Iterator[Event]:
    for process in dict.fromkeys(row.process for row in places):
        name = f"node {process - 1}" if process else "links"
        yield from _described("process", {"pid": process + 1}, name, process)
    for index, (row, place) in enumerate(places.items()):
        yield from _described("thread", place, row.name, index)


def _described(what: str, place: Place, name: str, index: int) -> Iterator[Event]:
    yield {"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", "ph": "M", **place, "args": {"sort_index": index}}


def _slice_events(
    slices: Slices, messages: Mapping[int, Message], stages: Sequence[str], places: Sequence[Place]
) -> Iterator[Event]:
    """The slices of all servers; the arrow of a message passes its first slice at each of them."""
    reached = set()
    begin, end = _microseconds(slices.begin), _microseconds(slices.end)
    columns = (slices.task, slices.server, begin, np.round(end - begin, DECIMALS), _legible(slices.size))
    for task, server, ts, duration, size in zip(*(column.tolist() for column in columns), strict=True):
        place, message = places[server], messages.get(task)
        if message is None:
            yield _slice(COMPUTES, stages[task], ts, duration, place, {"stage": stages[task]})
            continue
        yield _message_slice(message, ts, duration, size, place)
        if (task, server) not in reached:
            reached.add((task, server))
            yield _arrow("t", message, ts, place)


def _send_events(messages: Iterable[Message], places: Mapping[Row, Place]) -> Iterator[Event]:
    for message in messages:
        place = places[Row(message.source + 1, SENDS)]
        yield _message_slice(message, message.start, 0.0, message.size, place)
        yield _arrow("s", message, message.start, place)


def _receive_events(messages: Iterable[Message], places: Mapping[Row, Place]) -> Iterator[Event]:
    for message in messages:
        place = places[Row(message.destination + 1, RECEIVES)]
        yield _message_slice(message, message.finish, 0.0, message.size, place)
        yield _arrow("f", message, message.finish, place)


def _message_slice(message: Message, ts: float, duration: float, size: float, place: Place) -> Event:
    details = {
        "bytes": size,
        "source": message.source,
        "destination": message.destination,
        "stage": message.stage,
        "message": message.number,
    }
    return _slice(message.name, message.stage, ts, duration, place, details)


def _slice(name: str, category: str, ts: float, duration: float, place: Place, details: dict[str, Any]) -> Event:
    return {"name": name, "cat": category, "ph": "X", "ts": ts, "dur": duration, **place, "args": details}


def _arrow(phase: str, message: Message, ts: float, place: Place) -> Event:
    """Where the arrow of a message starts (`s`), passes (`t`) or ends (`f`): on the slice of its row at this time."""
    end = {"bp": "e"} if phase == "f" else {}
    return {"name": "message", "cat": "message", "ph": phase, "id": message.number, "ts": ts, **place, **end}


def _counters(slices: Slices, messages: Collection[Message], num_links: int) -> Iterator[Event]:
    on_link = slices.server < num_links
    begin, end = _microseconds(slices.begin[on_link]), _microseconds(slices.end[on_link])
    yield from _counter("links", "busy", begin, end, np.ones(len(begin)))
    start, finish, size = (np.array([getattr(m, name) for m in messages]) for name in ("start", "finish", "size"))
    yield from _counter("messages", "bytes under way", start, finish, size)


def _counter(
    name: str,
    series: str,
    begin: Float[np.ndarray, " span"],
    end: Float[np.ndarray, " span"],
    amount: Float[np.ndarray, " span"],
) -> Iterator[Event]:
    """The sum of the amounts whose spans, in µs, have begun and not ended: an event each time it changes."""
    moments, of = np.unique(np.concatenate([begin, end]), return_inverse=True)
    change = np.bincount(of, np.concatenate([amount, -amount])).astype(float)
    level = _legible(np.cumsum(change))
    changes = np.diff(level, prepend=0.0) != 0
    for ts, value in zip(moments[changes].tolist(), level[changes].tolist(), strict=True):
        yield {"name": name, "ph": "C", "pid": 1, "ts": ts, "args": {series: value}}


def _microseconds(seconds: Float[np.ndarray, " *shape"]) -> Float[np.ndarray, " *shape"]:
    return np.round(seconds * 1e6, DECIMALS)


def _legible(amount: Float[np.ndarray, " *shape"]) -> Float[np.ndarray, " *shape"]:
    """Bytes without the last digits, in which differences of times are off; adding 0 makes -0 plain 0."""
    return np.round(amount, 3) + 0.0
