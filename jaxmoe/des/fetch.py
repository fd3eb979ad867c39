"""A layer of experts that dies fetch slice by slice, from their HBM, from another die's, or from the LLC.

The simulator of the wafer-scale study of data movement (IV-D4, V-A): every slice is requested, read, carried over the
mesh, written as a copy where it is to be kept, and computed when it is there. HBM channels are servers like links, so
local reads, remote reads and writes of copies contend for them chunk by chunk.
"""

from dataclasses import dataclass

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


def replay_slices(machine: Machine, work: SliceWork, costs: FetchedSliceCosts, record: bool = False) -> SliceReplay:
    """Simulate a layer. At time 0 a die asks for all its slices, each of which streams to some of its cores.

    Of a slice `AT_ONCE` parts are on their way; a part is computed when it is there, and those of one die in turn. Each
    die begins with another expert and goes on in the order of their numbers, so that dies do not all ask the same home
    first. Raises `ValueError` for a home that is no die.
    """
    nodes = machine.num_nodes
    if work.home.min() < 0 or work.home.max() >= nodes:
        raise ValueError(f"homes span {work.home.min()}..{work.home.max()}, expected dies 0..{nodes - 1}")
    slices = _slices(machine, work, costs)
    size = costs.expert_bytes / costs.slices
    run = _run(machine, slices, size, costs, record)
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
    )
    first = np.lexsort((die, turn))
    return _Slices(**{name: getattr(slices, name)[first] for name in ("die", "source", "hit", "copied", "seconds")})


def _run(machine: Machine, slices: _Slices, size: float, costs: FetchedSliceCosts, record: bool) -> SimulatedRun:
    """Servers are the links, the channels of the LLC and of HBM, and one each for what takes latency alone."""
    topology, llc, hbm, nodes = machine.topology, machine.memory[0], machine.memory[-1], machine.num_nodes
    paths, links = paths_of(topology), machine.topology.num_links
    caches = links + np.asarray(llc.channel)
    channels = links + len(llc.bandwidth) + np.asarray(hbm.channel)
    hit = links + len(llc.bandwidth) + len(hbm.bandwidth)
    miss, write, servers = hit + 1, hit + 2, hit + 3
    channel_rates = [np.asarray(level.bandwidth, float) for level in (llc, hbm)]
    rate = np.concatenate([link_rates(topology), *channel_rates, [np.inf] * 3])
    waits = [np.asarray(topology.link_latency, float), np.zeros(len(llc.bandwidth)), np.asarray(hbm.latency, float)]
    latency = np.concatenate([*waits, [costs.hit, costs.miss, costs.write]])
    graph = GraphBuilder(servers, nodes)
    count, part = len(slices.die), size / PARTS
    die, source = slices.die, slices.source
    ask = _passing(np.where(slices.hit, hit, miss), paths.between(die, source))
    bring = _passing(np.where(slices.hit, caches[die], channels[source]), paths.between(source, die))
    kept = np.flatnonzero(slices.copied)
    store = rows_of([(write, channel) for channel in channels[die[kept]].tolist()])
    requests, first, later = np.where(slices.hit, 0.0, costs.request_bytes), no_rows(count), np.zeros(count)
    received: list[Int[np.ndarray, " slice"]] = []
    for number in range(PARTS):
        after = one_each(received[number - AT_ONCE]) if number >= AT_ONCE else first
        asked = graph.transfers(ask, later if number else requests, after)
        received.append(graph.transfers(bring, np.full(count, part), one_each(asked)))
        graph.computations(die, slices.seconds / PARTS, one_each(received[-1]))
        graph.transfers(store, np.full(len(kept), part), one_each(received[-1][kept]))
    return simulate(graph.build(), rate, latency, cut_through=True, record=record)


def _passing(first: Int[np.ndarray, " message"], ways: Rows) -> Rows:
    """Paths `ways` that pass the server `first` before all others."""
    messages = np.arange(len(first))
    owner, items = np.concatenate([messages, ways.owner]), np.concatenate([first, ways.items])
    return rows_by(owner, items, len(first))
