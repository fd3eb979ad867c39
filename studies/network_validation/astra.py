"""Every ASTRA-sim record (its congestion-aware analytical backend), in nanoseconds.

That backend counts whole nanoseconds: a chunk of b bytes holds a link for floor(b / bw), and is at the next device
after floor(latency + b / bw). `Truncated` makes links that do so for the chunk at hand.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from booksim import predict

from jaxmoe.des import Fabric, GraphBuilder, add_sends, fabric_of, replay_traffic, simulate
from jaxmoe.des.tasks import ring_all_reduce_sends
from jaxmoe.des.traffic import Order
from jaxmoe.hardware import AbstractTopology, Graph, Mesh, fully_connected, ring, switch
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, Contention, Passages, passages_of

GIBI_PER_NANO = 2**30 * 1e-9  # GiB/s in B/ns
TOPOLOGIES: dict[str, Callable[[int, float, float], Graph]] = {
    "Ring": ring,
    "Switch": switch,
    "FullyConnected": fully_connected,
}
FLITS_PER_CHUNK = 8.0
WAYS: dict[tuple[object, ...], Passages] = {}  # of networks, by what tells them apart here


def astra_rows(reference: Path) -> Iterator[dict[str, object]]:
    """Rows of all records; those of meshes in both orders of messages."""
    kinds = {"alltoall": _all_to_all, "ring_allreduce": _all_reduce}
    with np.load(reference / "booksim2_mesh" / "matrices.npz") as matrices:
        for record in json.loads((reference / "astra_analytical" / "index.json").read_text()):
            if record["kind"] == "mesh_matrix":
                yield from _mesh_matrix(record, matrices[record["booksim_id"]].astype(float))
            else:
                yield kinds[record["kind"]](record)


def truncated(fabric: Fabric, chunk_bytes: float) -> Fabric:
    """The fabric in whole units of time for chunks of this size, as the reference counts them."""
    exact = chunk_bytes / fabric.rate
    service = np.floor(exact)
    return replace(fabric, rate=chunk_bytes / service, latency=np.floor(fabric.latency + exact) - service)


def _topology(record: dict) -> Graph:
    rate = record["bandwidth_GiBps"] * GIBI_PER_NANO
    return TOPOLOGIES[record["topology"]](record["npus"], rate, record["latency_ns"])


def _row(record: dict, variant: str, cls: str, **times: float) -> dict[str, object]:
    return {"reference": "astra", "variant": variant, "class": cls, "record": record.get("booksim_id", "")} | times


def _all_to_all(record: dict) -> dict[str, object]:
    nodes, size = record["npus"], float(record["bytes_per_pair"])
    chunk, topology = size / record["chunks_per_message"], _topology(record)
    traffic = np.full((nodes, nodes), size)
    np.fill_diagonal(traffic, 0)
    order: Order = "staggered" if record["order"] == "staggered" else "by_destination"
    fabric = truncated(fabric_of(topology, chunk), chunk)
    return _row(
        record,
        f"{record['topology']}: all-to-all",
        record["order"],
        measured=record["completion_ns"],
        **_told(topology, traffic, chunk, order),
        des=replay_traffic(fabric, traffic, order).completion_s,
    )


def _all_reduce(record: dict) -> dict[str, object]:
    nodes, chunk = record["npus"], float(record["chunk_bytes"])
    topology = _topology(record)
    fabric = truncated(fabric_of(topology, chunk), chunk)
    graph = GraphBuilder(len(fabric.rate), 0, chunk)
    add_sends(graph, ring_all_reduce_sends(range(nodes), nodes * chunk), fabric.paths, [()] * nodes)
    step = np.zeros((nodes, nodes))
    step[np.arange(nodes), (np.arange(nodes) + 1) % nodes] = chunk
    told = _told(topology, step, chunk, "staggered")
    return _row(
        record,
        f"{record['topology']}: ring all-reduce",
        "ring",
        measured=record["completion_ns"],
        **{name: 2 * (nodes - 1) * seconds for name, seconds in told.items()},
        des=simulate(graph.build(), fabric.rate, fabric.latency).makespan,
    )


def _mesh_matrix(record: dict, traffic: np.ndarray) -> Iterator[dict[str, object]]:
    shape = (record["rows"], record["cols"])
    links = num_links(shape)
    mesh = Mesh(jnp.ones(links), jnp.full(links, 4.0), shape=shape, routing="yx")
    fabric = fabric_of(mesh, FLITS_PER_CHUNK)
    orders: tuple[tuple[str, Order], ...] = (("staggered", "staggered"), ("shuffle", "shuffled"))
    for key, order in orders:
        told, measured = _told(mesh, traffic, FLITS_PER_CHUNK, order), np.atleast_1d(record["completion_ns"][key])
        seen = np.mean([replay_traffic(fabric, traffic, order, seed).completion_s for seed in range(len(measured))])
        yield _row(record, f"mesh, {key}", record["cls"], measured=float(measured.mean()), **told, des=float(seen))


def _told(topology: AbstractTopology, traffic: np.ndarray, chunk: float, order: Order) -> dict[str, float]:
    """Completion as the model has it for this order, and as the load and the longest path alone do; the load of it."""
    matrices, known = jnp.asarray(traffic[None], jnp.float32), jnp.asarray(chunk)
    name = (type(topology).__name__, topology.num_links, topology.num_nodes, len(topology.positions()), order)
    if name not in WAYS:
        WAYS[name] = passages_of(topology, order)
    ways = WAYS[name]
    seconds, _ = predict(Contention(known, order=order, ways=ways, ways_back=ways), topology, matrices)
    plain, load = predict(Congestion(known), topology, matrices)
    return {"model": float(seconds[0]), "congestion": float(plain[0]), "model_load": float(load[0])}
