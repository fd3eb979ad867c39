"""The time between two tokens: MoE layers, and what every token passes beside the routed experts.

hd_moe reports whole-model times and does not say how attention is mapped, how long its context is, or how fast a node's
memory is. Assumed here: attention, dense FFNs and shared experts are divided evenly among all nodes (tensor
parallelism), a step decodes one token of every request, and what the nodes would have to send each other meanwhile is
left out, for the published whole-model times do not depend on the links but through the MoE layers.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import Work
from jaxmoe.hardware import Machine
from jaxmoe.relax import HardMax


class EvenPart(eqx.Module):
    """A part of the model that all nodes share evenly, all its layers together."""

    flops_per_token: Float[Array, ""]
    weight_bytes: Float[Array, ""]  # read once a step
    bytes_per_token: Float[Array, ""]  # read for every token: the context's keys and values

    def work(self, nodes: int, tokens: Float[Array, ""]) -> Work:
        """Work of every node in one step of `tokens` tokens."""
        moved = (self.weight_bytes + self.bytes_per_token * tokens) / nodes
        flops = tokens / nodes * self.flops_per_token
        return Work(jnp.broadcast_to(flops, (nodes,)), jnp.broadcast_to(moved, (nodes,)), jnp.zeros(nodes))

    def seconds(self, machine: Machine, tokens: Float[Array, ""]) -> Float[Array, ""]:
        """Time of one step of `tokens` tokens: that of the slowest node, s."""
        return self.work(machine.num_nodes, tokens).usage(machine, HardMax()).seconds


class BesideExperts(NamedTuple):
    """Seconds of one step beside the routed experts."""

    attention: Float[Array, ""]
    dense: Float[Array, ""]  # FFNs of dense layers
    shared: Float[Array, ""]  # shared experts

    @property
    def total(self) -> Float[Array, ""]:
        return self.attention + self.dense + self.shared


class EvenParts(eqx.Module):
    """Attention, dense FFNs and shared experts of a model on a machine."""

    machine: Machine
    attention: EvenPart
    dense: EvenPart
    shared: EvenPart

    @eqx.filter_jit
    def __call__(self, tokens: Float[Array, ""]) -> BesideExperts:
        """Time of one step of `tokens` tokens, s. TBT is its total plus the times of the MoE layers."""
        parts = (self.attention, self.dense, self.shared)
        return BesideExperts(*(part.seconds(self.machine, tokens) for part in parts))
