"""Stages of a layer beside its experts: tensor-parallel attention with its all-reduce, and tables sent ahead."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import Steps, Work
from jaxmoe.engine.stage import Stage, Stages
from jaxmoe.engine.times import ATTENTION
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.models import ElementBytes, MoEModel
from jaxmoe.models.moe import GroupedQueryAttention
from jaxmoe.network import AbstractTimeModel
from jaxmoe.network.collectives import all_to_all
from jaxmoe.network.flows import Rounds
from jaxmoe.relax import HardMax


class AbstractStages(eqx.Module):
    """Stages that ask the same of the machine wherever experts are placed."""

    @abc.abstractmethod
    def lower(
        self, topology: AbstractTopology, tokens: Float[Array, ""], times: AbstractTimeModel
    ) -> tuple[Stages, Stages]:
        """Stages before those of the experts, and stages after them, of a batch of so many tokens."""


class Metadata(AbstractStages):
    """Every node tells every other what it will send: one message of `size` bytes a pair (camoe 3.2)."""

    size: Float[Array, ""]

    def lower(
        self, topology: AbstractTopology, tokens: Float[Array, ""], times: AbstractTimeModel
    ) -> tuple[Stages, Stages]:
        everyone = 1 - jnp.eye(topology.num_nodes, dtype=self.size.dtype)
        return (Stage("metadata", Steps(all_to_all(everyone), self.size, times)),), ()


class GroupedAttention(AbstractStages):
    """Attention of one layer in equal groups of nodes, tensor-parallel inside each (moentwine II-A, Fig. 5).

    Groups have equal parts of the tokens. A node has its part of the heads and reads the keys and values that these
    need; then its group adds up the partial results in `all_reduce`, rounds over a buffer of one byte in every group.
    With `closing` rounds another sum follows at the end of the layer. FLOPs count as at the die's rate.
    """

    flops_per_token: Float[Array, ""]  # of one node for a token of its group
    weight_bytes: Float[Array, ""]  # of one node
    context_bytes: Float[Array, ""]  # keys and values that a node reads for a token of its group
    vector_bytes: Float[Array, ""]  # a hidden vector on the network
    groups: Float[Array, ""]
    all_reduce: Rounds
    closing: Rounds | None = None

    def lower(
        self, topology: AbstractTopology, tokens: Float[Array, ""], times: AbstractTimeModel
    ) -> tuple[Stages, Stages]:
        size = tokens / self.groups * self.vector_bytes
        before = (
            Stage("attention", self.work(topology, tokens), block=ATTENTION),
            Stage("all_reduce", Steps(self.all_reduce, size, times), block=ATTENTION),
        )
        return before, () if self.closing is None else (Stage("closing", Steps(self.closing, size, times)),)

    def work(self, topology: AbstractTopology, tokens: Float[Array, ""]) -> Work:
        """Work of every node for a batch of so many tokens."""
        nodes, own = topology.num_nodes, tokens / self.groups
        read = self.weight_bytes + own * self.context_bytes
        moved = 2 * own * self.vector_bytes  # vectors in, partial results out
        flops, weights, vectors = (
            jnp.broadcast_to(each, (nodes,)) for each in (own * self.flops_per_token, read, moved)
        )
        return Work(flops, weights, vectors)


def grouped_attention(
    moe: MoEModel,
    group_size: int,
    groups: int,
    context_tokens: float,
    all_reduce: Rounds,
    *,
    bytes_per_element: float,
    weight_bytes_per_element: float,
    kv_bytes_per_element: float | None = None,
    linear_speedup: float = 1.0,
    closing: Rounds | None = None,
    cached_tokens: float | None = None,
) -> GroupedAttention:
    """The attention of a model in groups of `group_size` nodes, each token reading `context_tokens` before it.

    Keys and values of so many `cached_tokens` are read from memory for a token, by default those of its context.

    Linear layers run `linear_speedup` times as fast as the die's rate (2 for INT8 on a machine stated in FP16,
    moentwine VI-A1). Hidden vectors have `bytes_per_element`, and keys and values too unless stated. Heads of grouped
    queries that share keys and values stay together, so more nodes than key heads read copies; the short vectors of
    latent attention are common to all heads, and every node of a group reads them whole. Raises `ModelError` for a
    model without attention.
    """
    projections = 2.0 * moe.attention_parameters / group_size
    attention = moe.known_attention
    read = moe.context_read(context_tokens)
    context = 2.0 * attention.context_products * read / group_size
    kv_bytes = bytes_per_element if kv_bytes_per_element is None else kv_bytes_per_element
    copies = min(group_size, attention.kv_heads) if isinstance(attention, GroupedQueryAttention) else 1
    return GroupedAttention(
        flops_per_token=_number(projections / linear_speedup + context),
        weight_bytes=_number(moe.attention_parameters * weight_bytes_per_element / group_size),
        context_bytes=_number(
            attention.cache_elements * (read if cached_tokens is None else cached_tokens) * kv_bytes / copies
        ),
        vector_bytes=_number(moe.hidden_size * bytes_per_element),
        groups=_number(float(groups)),
        all_reduce=all_reduce,
        closing=closing,
    )


def _number(value: float | int) -> Float[Array, ""]:
    return jnp.asarray(float(value), jnp.float32)  # JAX takes no whole number over 32 bits


# What all nodes share evenly, for the time between two tokens.
#
# hd_moe reports whole-model times and does not say how attention is mapped, how long its context is, or how fast a
# node's memory is. Assumed here: attention, dense FFNs and shared experts are divided evenly among all nodes (tensor
# parallelism), a step decodes one token of every request, and what the nodes would have to send each other meanwhile is
# left out, for the published whole-model times do not depend on the links but through the MoE layers.


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

    def times(self, layers: float | int) -> "EvenPart":
        """So many layers like this one."""
        return jax.tree.map(lambda leaf: layers * leaf, self)


def even_attention(
    moe: MoEModel, widths: ElementBytes, context_tokens: float | int, cached_tokens: float | None = None
) -> EvenPart:
    """Attention of one layer: two FLOPs for each weight and each product of a token with `context_tokens` before it.

    Keys and values of so many `cached_tokens` are read from memory for a token, by default those of its context.
    Raises `ModelError` for a model without attention.
    """
    parameters, attention = moe.attention_parameters, moe.known_attention
    read = moe.context_read(context_tokens)
    return EvenPart(
        flops_per_token=_number(2 * (parameters + read * attention.context_products)),
        weight_bytes=_number(parameters * widths.attention),
        bytes_per_token=_number(
            (read if cached_tokens is None else cached_tokens) * attention.cache_elements * widths.kv
        ),
    )


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
