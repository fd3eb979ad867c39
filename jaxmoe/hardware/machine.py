"""A machine: its network, its dies, the levels of their memory, and the energy that they take."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.kernels import AbstractGemm
from jaxmoe.hardware.topology import AbstractTopology

# One die (tile) of the machine: how fast it computes.


class Die(eqx.Module):
    """Compute of the nodes. Each number is per node, so nodes may differ.

    Without `gemm` every product runs at the full rate, whatever its shape. Dies that `overlap` read memory while they
    multiply; the time of others adds up.
    """

    flops: Float[Array, " node"]  # achievable FLOP/s
    gemm: AbstractGemm | None = None
    overlap: bool = eqx.field(static=True, default=True)


# Memory levels: what a node computes from, and the channels that it shares with others.


class MemoryLevel(eqx.Module):
    """One level of memory: a cache, the HBM of a die, or DDR that dies share. All are of this one type.

    A node reads and writes through one channel; several nodes may have the same one. `latency` is paid once by each
    stage that uses a channel. `capacity` is `None` where the level holds whatever is asked of it.
    """

    bandwidth: Float[Array, " channel"]  # B/s
    latency: Float[Array, " channel"]  # s
    capacity: Float[Array, " channel"] | None  # B
    channel: Int[Array, " node"]  # the channel that a node uses
    name: str = eqx.field(static=True, default="memory")

    @property
    def sharers(self) -> Float[Array, " channel"]:
        """Nodes that use each channel."""
        return self._by_channel(jnp.ones(self.channel.shape, self.bandwidth.dtype))

    def seconds(self, moved: Float[Array, " node"]) -> Float[Array, " channel"]:
        """How long every channel takes to move what its nodes ask for, B [node]; an unused one takes no time."""
        total = self._by_channel(moved)
        return jnp.where(total > 0, self.latency + total / self.bandwidth, 0)

    def _by_channel(self, values: Float[Array, " node"]) -> Float[Array, " channel"]:
        return _sums(values, self.channel, num_segments=self.bandwidth.shape[0])


_sums = jax.jit(jax.ops.segment_sum, static_argnames="num_segments")


@jax.jit
def _even_parts(level: MemoryLevel, capacity: Float[Array, " channel"]) -> Float[Array, " node"]:
    """Memory capacity of every node, B: its channel's capacity, divided equally among the nodes on that channel."""
    return jnp.take(capacity / jnp.maximum(level.sharers, 1), level.channel)


def node_memory(
    bandwidth: Float[Array, " node"] | None, capacity: Float[Array, " node"] | None = None, name: str = "memory"
) -> tuple[MemoryLevel, ...]:
    """A level with a channel for each node, B/s and B; no level where neither is limited."""
    given = capacity if bandwidth is None else bandwidth
    if given is None:
        return ()
    endless = jnp.asarray(np.full(given.shape, np.inf, given.dtype), given.dtype)
    nodes = jnp.asarray(np.arange(given.shape[0], dtype=np.int32), jnp.int32)
    rate = endless if bandwidth is None else bandwidth
    return (MemoryLevel(rate, jnp.asarray(np.zeros(rate.shape, rate.dtype), rate.dtype), capacity, nodes, name),)


# Energy: joules of a FLOP, of a byte of memory and of a link, and idle power of nodes.

COMPUTE, IDLE = "compute", "idle"

Joules = dict[str, Any]
"""Energy by resource, J [*lead]: `compute`, levels of memory, kinds of link, `idle`."""

Numbers = Array | np.ndarray  # of the model, or of the event simulator


class Energy(eqx.Module):
    """Energy of what the parts of a machine do. What is not known is `None`, or not there, and counts nothing.

    A byte counts at every link that it passes, so `links` are energies of a byte and hop.
    """

    compute: Float[Array, ""] | None = None  # J/FLOP
    memory: Mapping[str, Float[Array, ""]] = eqx.field(default_factory=dict)  # J/B, by name of a level
    links: Mapping[str, Float[Array, " link"]] = eqx.field(default_factory=dict)  # J/B, by kind; 0 at other kinds
    idle: Float[Array, ""] | None = None  # W of each node

    def of_links(self, carried: Float[Numbers, " link"]) -> Joules:
        """Energy of the bytes that every link carries, by kind of link, J."""
        return {kind: each @ carried for kind, each in self.links.items()}

    def of_flops(self, flops: Float[Numbers, " node"]) -> Joules:
        """Energy of the FLOPs of nodes, J."""
        return {} if self.compute is None else {COMPUTE: self.compute * flops.sum()}

    def of_memory(self, level: str, moved: Float[Numbers, " node"]) -> Joules:
        """Energy of the bytes that nodes move to and from a level of memory, J."""
        return {memory_part(level): self.memory[level] * moved.sum()} if level in self.memory else {}

    def of_nodes(self, flops: Float[Numbers, " node"], moved: Sequence[tuple[str, Float[Numbers, " node"]]]) -> Joules:
        """Energy of FLOPs, and of the bytes that the nodes move to and from every level of memory by name, J."""
        return added([self.of_flops(flops), *(self.of_memory(name, each) for name, each in moved)])

    def of_time(self, seconds: Float[Numbers, "*lead"], nodes: int) -> Joules:
        """Energy that all nodes take in so many seconds, busy or not, J."""
        return {} if self.idle is None else {IDLE: self.idle * seconds * nodes}


def memory_part(level: str) -> str:
    """The name of a level of memory among the parts."""
    return level if level == "memory" else f"memory_{level}"


def added(parts: Iterable[Mapping[str, Any]]) -> Joules:
    """Energies by resource, summed up."""
    total: Joules = {}
    for each in parts:
        for name, energy in each.items():
            total[name] = total[name] + energy if name in total else energy
    return total


# The machine: dies, the network between them, and the memory they compute from.


class Machine(eqx.Module):
    """A network, the dies at its nodes, and memory levels from the nearest to the one that holds the weights.

    Weights pass every level on their way to a die; hidden vectors move in and out of the nearest alone. Energy, area
    and price are `None` where nothing is known of them.
    """

    topology: AbstractTopology
    die: Die
    memory: tuple[MemoryLevel, ...] = ()
    energy: Energy | None = None
    area: Float[Array, ""] | None = None  # mm2 of the whole machine
    price: Float[Array, ""] | None = None  # of the whole machine, in its description's currency

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def levels(self) -> dict[str, MemoryLevel]:
        """Memory levels by name; a second one of a name has its depth behind it."""
        named: dict[str, MemoryLevel] = {}
        for depth, level in enumerate(self.memory):
            named[f"{level.name}_{depth}" if level.name in named else level.name] = level
        return named

    @property
    def capacity(self) -> Float[Array, " node"] | None:
        """Weights that fit each node, B: its even part of its channel of the last level. `None` is no limit."""
        level = self.memory[-1] if self.memory else None
        if level is None or level.capacity is None:
            return None
        return _even_parts(level, level.capacity)
