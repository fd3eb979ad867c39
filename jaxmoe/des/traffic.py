"""Replaying given traffic: one message from every node to every other, all there at time 0."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from jaxmoe.des.event_loop import SimulatedRun, run_on
from jaxmoe.des.fabric import Fabric, Rows
from jaxmoe.des.tasks import GraphBuilder, add_transfers, messages, no_rows

Order = Literal["staggered", "by_destination", "shuffled", "in_turns"]


@dataclass(frozen=True)
class TrafficReplay:
    """When traffic was complete, and how long every link was busy, s. `run` has the ports as well."""

    completion_s: float
    received_s: Float[np.ndarray, " node"]  # when a node had received everything; 0 for nothing
    link_busy: Float[np.ndarray, " link"]
    run: SimulatedRun


def replay_traffic(
    fabric: Fabric,
    traffic: Float[np.ndarray, "node node2"],
    order: Order = "staggered",
    seed: int = 0,
    record: bool = False,
    ready_s: Float[np.ndarray, "node node2"] | None = None,
) -> TrafficReplay:
    """Send traffic[s, d] bytes from every node s to every node d; the diagonal is free.

    A source sends its messages one after another: `staggered`, to s + 1, s + 2, ... round the nodes;
    `by_destination`, to 0, 1, 2, ...; `in_turns`, a chunk to each in turn; or `shuffled`, chunk by chunk in an order
    drawn with `seed`, source by source, as the orders of the BookSim2 and ASTRA-sim references were. Raises
    `ValueError` for an unknown order, and for traffic that is not finite or not of this network. `ready_s` says when
    what a node sends to another is there, as tokens are computed one after the other; those ready first are sent first,
    and of those ready together the first in the order. `None`: all at time 0.
    """
    nodes, traffic = fabric.num_nodes, np.asarray(traffic, float)
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}, expected one of {', '.join(get_args(Order))}")
    if traffic.shape != (nodes, nodes) or not ((traffic >= 0) & np.isfinite(traffic)).all():
        raise ValueError(f"traffic must be finite bytes, none negative, of the shape {(nodes, nodes)}")
    source, destination, size, before = messages_of(traffic, order, fabric.chunk_bytes, seed)
    sent = messages(fabric.paths, source, destination, size, before)
    graph = GraphBuilder(len(fabric.rate), 0 if ready_s is None else len(size), fabric.chunk_bytes)
    if ready_s is not None:
        if ready_s.shape != traffic.shape or not ((ready_s >= 0) & np.isfinite(ready_s)).all():
            raise ValueError(f"ready_s must be finite seconds, none negative, of the shape {traffic.shape}")
        each = np.arange(len(size))
        timers = graph.computations(each, ready_s[source, destination].astype(float), no_rows(len(size)))
        sent = replace(sent, sender=np.full(len(size), -1), after=Rows(np.arange(len(size) + 1), timers - len(size)))
    add_transfers(graph, sent, no_rows(nodes))
    run = run_on(fabric, graph.build(), record)
    received = np.zeros(nodes)
    np.maximum.at(received, destination, run.finish[len(run.finish) - len(size) :])
    return TrafficReplay(run.makespan, received, run.link_busy[: fabric.num_links], run)


Messages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def messages_of(
    traffic: Float[np.ndarray, "node node2"], order: Order, chunk_bytes: float | None, seed: int = 0
) -> Messages:
    """Source, destination and size of every message, by source and in its order; chunk by chunk, of every chunk.

    The last numbers are how many chunks of its message were cut off before.
    """
    nodes = len(traffic)
    source = np.repeat(np.arange(nodes), nodes)
    step = np.tile(np.arange(nodes), nodes)
    destination = step if order in ("by_destination", "shuffled") else (source + step) % nodes
    size = traffic[source, destination]
    sent = (size > 0) & (source != destination)
    sizes = source[sent], destination[sent], size[sent]
    if order in ("staggered", "by_destination"):
        return *sizes, np.zeros(int(sent.sum()), np.int64)
    return _chunks(*sizes, order, chunk_bytes, seed)


def _chunks(
    source: np.ndarray, destination: np.ndarray, size: np.ndarray, order: Order, chunk_bytes: float | None, seed: int
) -> Messages:
    """Every chunk a message of its own, those of each source in random order, or first chunks first."""
    chunk = chunk_bytes if chunk_bytes is not None and chunk_bytes > 0 else np.inf
    count = np.maximum(np.ceil(size / chunk), 1).astype(int)
    message = np.repeat(np.arange(len(size)), count)
    last = np.cumsum(count) - 1
    before = np.arange(len(message)) - (last - count + 1)[message]
    amount = np.minimum(chunk, size)[message]
    amount[last] = size - (count - 1) * np.minimum(chunk, size)
    if order == "shuffled":
        draw, chunks = np.random.default_rng(seed), np.bincount(source[message])
        first = np.cumsum(chunks) - chunks
        orders = [start + draw.permutation(n) for start, n in zip(first, chunks, strict=True)]
        ordered = np.concatenate([np.zeros(0, np.int64), *orders])
    else:
        ordered = np.argsort(before, kind="stable")
    return source[message][ordered], destination[message][ordered], amount[ordered], before[ordered]
