"""Plans timed in the simulator, also where routers have finite buffers.

Routers with finite buffers cannot keep a chunk until others come that are to be added to it. There nodes carry trees
out: over every link of a tree goes a message from a node to its neighbour, through the ports of both. What it takes
that nodes do so is told apart by the same messages on routers with unbounded buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxmoe.des import Fabric, LayerDescription
from jaxmoe.des.description import node_seconds, plan_tokens
from jaxmoe.des.event_loop import run_on
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.des.fabric import one_each, rows_by
from jaxmoe.des.tasks import GraphBuilder, Transfers, add_transfers, no_rows
from jaxmoe.traces import Batch

LATENCIES = tuple(f"hardware.{of}_ns=20" for of in ("link.latency", "router.endpoint_latency"))
ROUTERS = ("hardware.router.flit_B=64", "hardware.router.num_vcs=4", "hardware.router.vc_buf_size=16")


@dataclass(frozen=True)
class Simulated:
    """Seconds of batches, [1, batch]."""

    compute: np.ndarray
    communication: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.communication


def simulated(layer: LayerDescription, share: np.ndarray, batches: Batch, by_nodes: bool) -> Simulated:
    """Batches, leaves [1, batch, ...], of one layer: dispatch, compute and combine one after the other."""
    leaves = jax.tree.map(np.asarray, batches)
    single = [jax.tree.map(lambda leaf, at=at: leaf[0, at], leaves) for at in range(leaves.experts.shape[1])]
    found = np.array([_seconds(layer, share, batch, by_nodes) for batch in single])
    return Simulated(found[None, :, 0], found[None, :, 1])


def _seconds(layer: LayerDescription, share: np.ndarray, batch: Batch, by_nodes: bool) -> tuple[float, float]:
    plan, fabric = plan_tokens(layer, share, batch), layer.fabric
    sent = 0.0
    for size, mirrored in ((layer.dispatch_bytes, True), (layer.combine_bytes, False)):
        draw = np.asarray(batch.token_draw)
        parts = stage_transfers(layer.exchange, fabric, plan.visited, plan.home, size, mirrored, draw)
        sent += makespan(fabric, [between_neighbours(fabric, part) for part in parts] if by_nodes else parts)
    return float(node_seconds(layer, plan, batch).max()), sent


def makespan(fabric: Fabric, parts: Sequence[Transfers]) -> float:
    """Seconds of transfers, with a barrier between parts."""
    graph = GraphBuilder(len(fabric.rate), fabric.num_nodes, fabric.chunk_bytes)
    ready = no_rows(fabric.num_nodes)
    for part in parts:
        received = add_transfers(graph, part, ready)
        ready = one_each(np.full(fabric.num_nodes, graph.barrier(received.items)))
    return run_on(fabric, graph.build()).makespan


def between_neighbours(fabric: Fabric, transfers: Transfers) -> Transfers:
    """Transfers in which every step of a tree over a link is a message through the ports of the nodes at its ends.

    Steps through a port alone, into a tree and out of it, take nothing. Messages stay as they are.
    """
    assert fabric.ends is not None
    assert fabric.injection is not None
    assert fabric.ejection is not None
    paths = transfers.paths
    step = paths.lengths == 1  # a message passes two ports and a link at least
    first = np.append(paths.items, 0)[paths.start[:-1]]  # of an empty path of no meaning
    link = np.flatnonzero(step & (first < fabric.num_links))
    over = first[link]
    ports = fabric.injection + fabric.ends[over, 0], fabric.ejection + fabric.ends[over, 1]
    stays = ~step[paths.owner]
    owner = np.concatenate([paths.owner[stays], np.repeat(link, 3)])
    items = np.concatenate([paths.items[stays], np.stack([ports[0], over, ports[1]], axis=1).ravel()])
    # Each takes the next of its receiver's ports: numbered alike, all from one node would take the same.
    turns = np.arange(len(paths)) if len(link) else transfers.chunks_before
    return replace(transfers, paths=rows_by(owner, items, len(paths)), chunks_before=turns)
