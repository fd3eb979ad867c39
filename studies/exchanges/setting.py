"""What all cases have in common: networks of 16 nodes, the numbers of a layer, its model, its trace."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxmoe.engine import Layer, LayerCosts
from jaxmoe.hardware import AbstractTopology, Die, Machine, Mesh, build_graph, clusters, torus, wafers
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import AbstractExchange, Congestion
from jaxmoe.traces import GatingTrace, synthetic_trace

NODES, EXPERTS, TOP_K, HIDDEN, COLUMNS = 16, 16, 4, 2048, 1024
BANDWIDTH, FLOPS, CHUNK = 50e9, 5e12, 1024.0  # B/s of a link, FLOP/s of a die, B
VECTOR, WEIGHTS, WORK = 4.0 * HIDDEN, 12.0 * HIDDEN * COLUMNS, 6.0 * HIDDEN * COLUMNS  # B, B, FLOP per token, expert
LATENCY, ENDPOINT = 2e-7, 1e-7  # s, where there are any
CHORDS = ((0, 8), (2, 11), (4, 13), (6, 15))
SEED = 3
TIMES = ("model_communication_s", "simulated_communication_s", "model_total_s", "simulated_total_s")


def graph(latency: float) -> AbstractTopology:
    """A ring with four chords."""
    pairs = [*((node, (node + 1) % NODES) for node in range(NODES)), *CHORDS]
    ends = [*pairs, *((b, a) for a, b in pairs)]
    angle = 2 * np.pi * np.arange(NODES) / NODES
    numbers = (np.full(len(ends), value) for value in (BANDWIDTH, latency))
    return build_graph(NODES, ends, *numbers, np.stack([np.cos(angle), np.sin(angle)], axis=1))


NETWORKS: dict[str, Callable[[float], AbstractTopology]] = {
    "mesh": lambda latency: Mesh(
        jnp.full(num_links((4, 4)), BANDWIDTH, jnp.float32), jnp.full(num_links((4, 4)), latency), shape=(4, 4)
    ),
    "torus": lambda latency: torus((4, 4), BANDWIDTH, latency),
    "wafers": lambda latency: wafers((2, 4), (2, 1), BANDWIDTH, latency, BANDWIDTH / 2, 3 * latency),
    "clusters": lambda latency: clusters(4, 4, BANDWIDTH, latency, 2 * BANDWIDTH, 2 * latency),
    "graph": graph,
}


def network(name: str, slow: bool) -> AbstractTopology:
    """A network with latency and ports, or without."""
    if not slow:
        return NETWORKS[name](0.0)
    port = jnp.full(NODES, BANDWIDTH, jnp.float32)
    return replace(
        NETWORKS[name](LATENCY), injection_bandwidth=port, ejection_bandwidth=port, endpoint_latency=ENDPOINT
    )


def model_on(topology: AbstractTopology, exchange: AbstractExchange, cut_through: bool = False) -> Layer:
    """A layer on a machine with this network."""
    numbers = (VECTOR, VECTOR, WEIGHTS, WORK, float(COLUMNS), 3.0)
    return Layer(
        machine=Machine(topology, Die(jnp.full(NODES, FLOPS, jnp.float32))),
        costs=LayerCosts(*(jnp.asarray(number, jnp.float32) for number in numbers)),
        time_model=Congestion(jnp.asarray(CHUNK, jnp.float32), cut_through),
        exchange=exchange,
        mode="sharded",
    )


def gating() -> GatingTrace:
    """The trace of which batches are drawn."""
    return synthetic_trace(2048, range(1), EXPERTS, TOP_K, skew=0.6, coactivation=0.2, reuse=0.2, seed=0)
