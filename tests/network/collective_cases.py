"""Meshes and replays that tests of collectives share."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from oracles.arrays import full

from jaxmoe.des import GraphBuilder, add_sends, fabric_of, simulate
from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import (
    Congestion,
    price_rounds,
)
from jaxmoe.relax import HardMax

SIZE, BANDWIDTH, LATENCY = 1.2e6, 50e9, 1e-6
WHOLE = Congestion(jnp.asarray(0.0))
EXACT = HardMax()


def mesh_of(shape, routing="xy", **ports):
    links = num_links(shape)
    bandwidth, latency = (full(links, number) for number in (BANDWIDTH, LATENCY))
    return Mesh(bandwidth, latency, shape=shape, routing=routing, **ports)


def uneven_mesh(shape, seed=0, routing="xy", dtype=jnp.float32):
    rng, links = np.random.default_rng(seed), num_links(shape)
    bandwidth, latency = rng.uniform(20e9, 60e9, links), rng.uniform(1e-7, 1e-6, links)
    return Mesh(jnp.asarray(bandwidth, dtype), jnp.asarray(latency, dtype), shape=shape, routing=routing)


@eqx.filter_jit
def jitted_time(model, topology, rounds, reduction):
    return price_rounds(model, topology, rounds, reduction).seconds


def seconds(topology, rounds, model=WHOLE, reduction=EXACT):
    return float(jitted_time(model, topology, rounds, reduction))


def replay(topology, sends, chunk_bytes=None):
    """Seconds that the event simulator takes over a schedule."""
    fabric = fabric_of(topology, chunk_bytes)
    graph = GraphBuilder(len(fabric.rate), 0, chunk_bytes)
    add_sends(graph, sends, fabric.paths, [()] * fabric.num_nodes)
    return simulate(graph.build(), fabric.rate, fabric.latency).makespan
