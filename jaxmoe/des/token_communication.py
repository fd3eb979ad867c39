"""Communication of a token layout, message by message: all-reduce in rounds of ring steps, dispatch and combine.

An independent witness of `jaxmoe.network.token_communication`: it shares the layout and the tokens with it, and no
formula. Tokens are counted one by one, and every time is the end of a simulation. Dispatch sends the messages of
combine back over the same links. A device sends its messages in turns, a chunk to each destination.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.event_loop import SimulatedRun, run_on
from jaxmoe.des.fabric import Fabric, FabricPaths, one_each
from jaxmoe.des.tasks import GraphBuilder, add_transfers, messages, no_rows
from jaxmoe.des.traffic import messages_of
from jaxmoe.placement.token_layout import TokenLayout

Traffic = Float[np.ndarray, "node node2"]


@dataclass(frozen=True)
class StageReplay:
    """Seconds of a stage, and how long every link was busy in it."""

    seconds: float
    link_busy: Float[np.ndarray, " link"]


def replay_communication(
    fabric: Fabric,
    layout: TokenLayout,
    visited: Bool[np.ndarray, "token node"],
    group: Int[np.ndarray, " token"],
    vector_bytes: float,
) -> dict[str, StageReplay]:
    """All-reduce, dispatch and combine of a batch: token t of `group[t]` visits the nodes where `visited` is true.

    The all-reduce is of the mean tokens of a group. A barrier over all nodes follows every step of a ring, and every
    phase of an exchange.
    """
    tokens = len(group) / layout.num_groups
    combine = exchange_traffic(fabric, layout, visited, group)
    back = [(traffic * vector_bytes, fabric.mirrored) for traffic in combine[::-1]]
    return {
        "all_reduce": _replay(fabric, [(step, fabric.paths) for step in reduce_steps(layout, tokens * vector_bytes)]),
        "dispatch": _replay(fabric, [(traffic.T, paths) for traffic, paths in back]),
        "combine": _replay(fabric, [(traffic * vector_bytes, fabric.paths) for traffic in combine]),
    }


def reduce_steps(layout: TokenLayout, size: float) -> Iterator[Traffic]:
    """Yield the traffic of every step of the ring all-reduce of `size` B, B [node, node].

    Every ring sends half of the bytes each way round; a ring of two nodes sends all of them one way.
    """
    part, wafers = size / layout.tp, layout.wafer_rings
    yield from _ring_steps(layout.ring, part, layout.num_nodes)
    if layout.on_every_wafer:
        yield from _ring_steps(wafers, part, layout.num_nodes)
    if layout.gathered:
        copies = wafers.shape[1] if layout.on_every_wafer else 1
        yield from _ring_steps(layout.ring, part * copies, layout.num_nodes)


def _ring_steps(rings: Int[np.ndarray, "ring place"], part: float, nodes: int) -> Iterator[Traffic]:
    places = rings.shape[1]
    traffic = np.zeros((nodes, nodes))
    for ring in rings.tolist():
        for node, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            if places == 2:  # one way
                traffic[node, following] += part
            elif places > 2:
                traffic[node, following] += part / 2
                traffic[following, node] += part / 2
    for _ in range(places - 1):
        yield traffic


# What combine sends, in vectors: phases with a barrier between them.


def exchange_traffic(
    fabric: Fabric, layout: TokenLayout, visited: Bool[np.ndarray, "token node"], group: Int[np.ndarray, " token"]
) -> list[Traffic]:
    """The phases of combine; dispatch is their mirror."""
    if fabric.mesh_shape is None:
        return _over_clusters(layout, visited, group)
    if layout.sliced:
        return _round_slices(layout, visited, group)
    traffic = np.zeros((layout.num_nodes,) * 2)
    parts = layout.parts.shape[1]
    for token, node in np.argwhere(visited).tolist():
        for holder in layout.parts[group[token], :, node].tolist():
            traffic[node, holder] += 1 / parts
    return [traffic]


def _over_clusters(
    layout: TokenLayout, visited: Bool[np.ndarray, "token node"], group: Int[np.ndarray, " token"]
) -> list[Traffic]:
    """To the device of the home's rank in every cluster, and from there to the home; members of a group take turns."""
    size = layout.shape[1]
    inside, between = np.zeros((2, layout.num_nodes, layout.num_nodes))
    for token, nodes in enumerate(visited):
        home = int(layout.ring[group[token], token % layout.tp])
        relays = set()
        for node in np.flatnonzero(nodes).tolist():
            relay = node // size * size + home % size
            relays.add(relay)
            if layout.group[node] != group[token]:
                inside[node, relay] += 1
        for relay in relays:
            between[relay, home] += 1
    return [inside, between]


def _round_slices(
    layout: TokenLayout, visited: Bool[np.ndarray, "token node"], group: Int[np.ndarray, " token"]
) -> list[Traffic]:
    """A reduce-scatter round the devices that share experts, half of each part either way, then back to the homes.

    In a full token domain a part ends at the device of its group. Elsewhere every device has an equal part of all.
    """
    rings, nodes = layout.slice_rings, layout.num_nodes
    places = rings.shape[1]
    own, back = np.zeros(nodes), np.zeros((nodes, nodes))
    for token, node in np.argwhere(visited).tolist():
        if layout.name != "esp":
            own[node] += 1 / places
            back[node, layout.fetch[group[token], node]] += 1 / places
        elif layout.group[node] == group[token]:
            own[node] += 1
    steps = []
    for step in range(1, places):
        traffic = np.zeros((nodes, nodes))
        for ring in rings:
            ways = [ring, ring[::-1]] if places > 2 else [ring]
            for way in ways:
                for place, node in enumerate(way.tolist()):
                    owner = way[(place - step) % places]
                    traffic[node, way[(place + 1) % places]] += own[owner] / len(ways)
        steps.append(traffic)
    return [*steps, back]


# The simulation of traffic in phases.


def _replay(fabric: Fabric, phases: Sequence[tuple[Traffic, FabricPaths]]) -> StageReplay:
    """Phases one after the other, with a barrier over all nodes between them."""
    graph = GraphBuilder(len(fabric.rate), 0, fabric.chunk_bytes)
    ready = no_rows(fabric.num_nodes)
    for traffic, paths in phases:
        sent = messages(paths, *messages_of(traffic, "in_turns", fabric.chunk_bytes))
        add_transfers(graph, sent, ready)
        barrier = graph.barrier(np.arange(graph.num_tasks))
        ready = one_each(np.full(fabric.num_nodes, barrier))
    run: SimulatedRun = run_on(replace(fabric, burst=None), graph.build())
    return StageReplay(run.makespan, run.link_busy[: fabric.num_links])
