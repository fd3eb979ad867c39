"""A layer of experts that dies fetch slice by slice, from their HBM, from another die's, or from the LLC.

The simulator of the wafer-scale study of data movement (IV-D4, V-A): every slice is requested, read, carried over the
mesh, written as a copy where it is to be kept, and computed when it is there. HBM channels are servers like links, so
local reads, remote reads and writes of copies contend for them chunk by chunk.
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.event_loop import SimulatedRun, simulate
from jaxmoe.des.fabric import Rows, link_rates, one_each, paths_of, rows_by, rows_of
from jaxmoe.des.tasks import GraphBuilder, no_rows
from jaxmoe.hardware import Machine

PARTS = 16  # of a slice: what a server serves at a time
AT_ONCE = 4  # parts of a slice that are on their way at once


@dataclass(frozen=True)
class FetchedSliceCosts:
    """Costs of an expert that dies fetch slice by slice: sizes, B, and latencies, s, as in Table I."""

    expert_bytes: float  # weights of one expert
    flops_per_request: float  # of one token at one expert
    slices: int  # of one expert
    request_bytes: float  # message that asks for a slice
    hit: float  # latency of the LLC for a slice that it holds
    miss: float  # latency of the LLC before HBM is asked for a slice that it does not hold
    write: float  # latency of writing a copy to HBM


@dataclass(frozen=True)
class SliceWork:
    """Requests that every die computes in one layer, each a token at an expert, and where the experts' weights are."""

    requests: Int[np.ndarray, "expert die"]
    home: Int[np.ndarray, " expert"]  # die whose HBM holds the expert
    local: Bool[np.ndarray, "expert die"]  # in the HBM of the die itself
    copied: Bool[np.ndarray, "expert die"]  # the die writes what it fetches to its own HBM
    hits: Float[np.ndarray, "expert die"]  # the part of an expert that the LLC has


@dataclass(frozen=True)
class SliceReplay:
    """Seconds of the layer, and what was moved, B; `run` has busy seconds of links, LLCs, HBM channels, and of dies."""

    seconds: float
    hops: int
    local_read: float
    remote_read: float
    local_write: float
    llc_read: float
    run: SimulatedRun


@dataclass(frozen=True)
class _Slices:
    """Slices that dies read, in the order in which they request them."""

    die: Int[np.ndarray, " slice"]
    source: Int[np.ndarray, " slice"]  # the die whose HBM has it; `die` itself where it is there, or in the LLC
    hit: Bool[np.ndarray, " slice"]  # in the LLC
    copied: Bool[np.ndarray, " slice"]
    seconds: Float[np.ndarray, " slice"]  # of compute
    turn: Int[np.ndarray, " slice"]  # how many slices its die requests before it

    def take(self, rows: Int[np.ndarray, " taken"]) -> "_Slices":
        """These slices."""
        return _Slices(*(getattr(self, field.name)[rows] for field in fields(self)))


def replay_slices(
    machine: Machine,
    work: SliceWork,
    costs: FetchedSliceCosts,
    record: bool = False,
    outstanding: int | None = None,
    cut_through: bool = True,
) -> SliceReplay:
    """Simulate a layer. Each die begins with another expert and goes on in the order of their numbers, so that dies do
    not all ask the same home first. Raises `ValueError` for a home that is no die.

    With `outstanding` reads a die asks for a slice when the one so many before it is there, whole; slices are moved and
    computed whole, and cut through every link or are stored and forwarded. What asks for one has a channel of its own
    on every link, and waits for no data. Without, a die asks for all its slices at
    time 0, and each streams to some of its cores: `AT_ONCE` parts are on their way, and a part is computed when it is
    there, those of one die in turn.
    """
    nodes = machine.num_nodes
    if work.home.min() < 0 or work.home.max() >= nodes:
        raise ValueError(f"homes span {work.home.min()}..{work.home.max()}, expected dies 0..{nodes - 1}")
    slices = _slices(machine, work, costs)
    size = costs.expert_bytes / costs.slices
    run = _run(machine, slices, size, costs, record, outstanding, cut_through)
    remote = slices.source != slices.die
    return SliceReplay(
        seconds=run.makespan,
        hops=int(paths_of(machine.topology).hops[slices.source, slices.die].sum()),
        local_read=float((~remote & ~slices.hit).sum() * size),
        remote_read=float(remote.sum() * size),
        local_write=float(slices.copied.sum() * size),
        llc_read=float(slices.hit.sum() * size),
        run=run,
    )


def _slices(machine: Machine, work: SliceWork, costs: FetchedSliceCosts) -> _Slices:
    nodes, experts = machine.num_nodes, len(work.home)
    expert, die = np.nonzero(work.requests)
    start = (expert - die * experts // nodes) % experts
    order = np.repeat(np.lexsort((start, die)), costs.slices)
    expert, die = expert[order], die[order]
    count = np.bincount(die, minlength=nodes)
    number = np.tile(np.arange(costs.slices), len(die) // costs.slices)  # of the slice in its expert
    hit = number < np.round(work.hits[expert, die] * costs.slices)
    afar = ~np.asarray(work.local[expert, die], bool) & ~hit
    turn = np.arange(len(die)) - (np.cumsum(count) - count)[die]
    seconds = work.requests[expert, die] * costs.flops_per_request / costs.slices / np.asarray(machine.die.flops)[die]
    slices = _Slices(
        die=die,
        source=np.where(afar, work.home[expert], die),
        hit=hit,
        copied=np.asarray(work.copied[expert, die], bool) & afar,
        seconds=seconds,
        turn=turn,
    )
    return slices.take(np.lexsort((die, turn)))


class _Reading:
    """A graph of reads and what follows them.

    Servers are the links, the channels of the LLC and of HBM, one each for what takes latency alone, and, where what
    asks travels `apart`, the links again.
    """

    def __init__(self, machine: Machine, costs: FetchedSliceCosts, apart: bool) -> None:
        topology, llc, hbm = machine.topology, machine.memory[0], machine.memory[-1]
        links, own = topology.num_links, len(llc.bandwidth) + len(hbm.bandwidth)
        self.costs, self.paths = costs, paths_of(topology)
        self.caches = links + np.asarray(llc.channel)
        self.channels = links + len(llc.bandwidth) + np.asarray(hbm.channel)
        self.hit, self.miss, self.write, again = range(links + own, links + own + 4)
        self.asking = again if apart else 0
        channel_rates = [np.asarray(level.bandwidth, float) for level in (llc, hbm)]
        link_rate, way = link_rates(topology), np.asarray(topology.link_latency, float)
        self.rate = np.concatenate([link_rate, *channel_rates, [np.inf] * 3, link_rate[: links * apart]])
        waits = [np.zeros(len(llc.bandwidth)), np.asarray(hbm.latency, float), [costs.hit, costs.miss, costs.write]]
        self.latency = np.concatenate([way, *waits, way[: links * apart]])
        self.graph = GraphBuilder(len(self.rate), machine.num_nodes)

    def read(self, slices: _Slices, size: float, asked: bool, after: Rows, part: float = 1.0) -> Int[np.ndarray, " s"]:
        """Adds reads of so many bytes of each slice, requests for them where they are `asked` for, the products of so
        large a part of it, and writes of copies. Returns the tasks that deliver."""
        die, source, hit = slices.die, slices.source, slices.hit
        ways = self.paths.between(die, source)
        ask = _passing(np.where(hit, self.hit, self.miss), Rows(ways.start, ways.items + self.asking))
        bring = _passing(np.where(hit, self.caches[die], self.channels[source]), self.paths.between(source, die))
        requests = np.where(hit | (not asked), 0.0, self.costs.request_bytes)
        sent = self.graph.transfers(ask, requests, after)
        received = self.graph.transfers(bring, np.full(len(die), size), one_each(sent))
        self.graph.computations(die, slices.seconds * part, one_each(received))
        kept = np.flatnonzero(slices.copied)
        store = rows_of([(self.write, channel) for channel in self.channels[die[kept]].tolist()])
        self.graph.transfers(store, np.full(len(kept), size), one_each(received[kept]))
        return received


def _run(
    machine: Machine,
    slices: _Slices,
    size: float,
    costs: FetchedSliceCosts,
    record: bool,
    outstanding: int | None,
    cut_through: bool,
) -> SimulatedRun:
    reading = _Reading(machine, costs, apart=outstanding is not None)
    if outstanding is None:
        _stream(reading, slices, size)
    else:
        _take_turns(reading, slices, size, outstanding)
    return simulate(reading.graph.build(), reading.rate, reading.latency, cut_through=cut_through, record=record)


def _stream(reading: _Reading, slices: _Slices, size: float) -> None:
    """Reads every slice in parts."""
    received: list[Int[np.ndarray, " slice"]] = []
    for number in range(PARTS):
        after = one_each(received[number - AT_ONCE]) if number >= AT_ONCE else no_rows(len(slices.die))
        received.append(reading.read(slices, size / PARTS, number == 0, after, 1 / PARTS))


def _take_turns(reading: _Reading, slices: _Slices, size: float, outstanding: int) -> None:
    """Reads whole slices, each when the one so many before it is there."""
    received = np.full((slices.turn.max(initial=-1) + 1, slices.die.max(initial=-1) + 1), -1)
    for turn in range(len(received)):
        own = slices.take(np.flatnonzero(slices.turn == turn))
        before = turn - outstanding
        after = no_rows(len(own.die)) if before < 0 else one_each(received[before, own.die])
        received[turn, own.die] = reading.read(own, size, True, after)


def _passing(first: Int[np.ndarray, " message"], ways: Rows) -> Rows:
    """Paths `ways` that pass the server `first` before all others."""
    messages = np.arange(len(first))
    owner, items = np.concatenate([messages, ways.owner]), np.concatenate([first, ways.items])
    return rows_by(owner, items, len(first))
