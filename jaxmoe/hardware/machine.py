"""The machine: dies, the network between them, and the memory they compute from."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.die import Die
from jaxmoe.hardware.memory import MemoryLevel
from jaxmoe.hardware.topology import AbstractTopology


class Machine(eqx.Module):
    """A network, the dies at its nodes, and memory levels from the nearest to the one that holds the weights.

    Weights pass every level on their way to a die; hidden vectors move in and out of the nearest alone.
    """

    topology: AbstractTopology
    die: Die
    memory: tuple[MemoryLevel, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def capacity(self) -> Float[Array, " node"] | None:
        """Weights that fit each node, B: its even part of its channel of the last level. `None` is no limit."""
        level = self.memory[-1] if self.memory else None
        if level is None or level.capacity is None:
            return None
        return jnp.take(level.capacity / jnp.maximum(level.sharers, 1), level.channel)
