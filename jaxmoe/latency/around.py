"""Stages of a layer around its experts: tensor-parallel attention with its all-reduce, and tables sent ahead."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology
from jaxmoe.models import MoEModel
from jaxmoe.models.moe import GroupedQueryAttention
from jaxmoe.network.collectives import all_to_all
from jaxmoe.network.exchange import Rounds


class NodeWork(eqx.Module):
    """What nodes compute besides experts, in FLOPs at the die's rate, and the bytes that they move for it."""

    flops: Float[Array, " node"]
    weights: Float[Array, " node"]  # B, through every level of memory
    vectors: Float[Array, " node"]  # B, to and from the nearest


class Steps(eqx.Module):
    """Traffic in rounds, one after the other, whose amounts are of `unit` bytes each.

    Mirrored, rounds come in the opposite order, and messages go back over the same links reversed.
    """

    rounds: Rounds
    unit: Float[Array, ""]
    mirrored: bool = eqx.field(static=True, default=False)


class AbstractStages(eqx.Module):
    """Stages that ask the same of the machine wherever experts are placed."""

    @abc.abstractmethod
    def lower(self, topology: AbstractTopology, tokens: Float[Array, ""]) -> dict[str, NodeWork | Steps]:
        """The demand of every stage, by name, of a batch of so many tokens."""


class Metadata(AbstractStages):
    """Every node tells every other what it will send: one message of `size` bytes a pair (camoe 3.2)."""

    size: Float[Array, ""]

    def lower(self, topology: AbstractTopology, tokens: Float[Array, ""]) -> dict[str, NodeWork | Steps]:
        everyone = 1 - jnp.eye(topology.num_nodes, dtype=self.size.dtype)
        return {"metadata": Steps(all_to_all(everyone), self.size)}


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

    def lower(self, topology: AbstractTopology, tokens: Float[Array, ""]) -> dict[str, NodeWork | Steps]:
        nodes, own = topology.num_nodes, tokens / self.groups
        read = self.weight_bytes + own * self.context_bytes
        moved = 2 * own * self.vector_bytes  # vectors in, partial results out
        work = NodeWork(*(jnp.broadcast_to(each, (nodes,)) for each in (own * self.flops_per_token, read, moved)))
        size = own * self.vector_bytes
        stages: dict[str, NodeWork | Steps] = {"attention": work, "all_reduce": Steps(self.all_reduce, size)}
        return stages if self.closing is None else stages | {"closing": Steps(self.closing, size)}


def grouped_attention(
    moe: MoEModel,
    group_size: int,
    groups: int,
    context_tokens: float,
    all_reduce: Rounds,
    *,
    bytes_per_element: float,
    weight_bytes_per_element: float,
    linear_speedup: float = 1.0,
    closing: Rounds | None = None,
) -> GroupedAttention:
    """The attention of a model in groups of `group_size` nodes, each token reading `context_tokens` before it.

    Linear layers run `linear_speedup` times as fast as the die's rate (2 for INT8 on a machine stated in FP16,
    moentwine VI-A1). Keys and values have `bytes_per_element`. Heads of grouped queries that share keys and values stay
    together, so more nodes than key heads read copies; the short vectors of latent attention are common to all heads,
    and every node of a group reads them whole. Raises `ModelError` for a model without attention.
    """
    projections = 2.0 * moe.attention_parameters / group_size
    attention = moe.attention
    assert attention is not None  # or its parameters could not be counted
    context = 2.0 * attention.context_products * context_tokens / group_size
    copies = min(group_size, attention.kv_heads) if isinstance(attention, GroupedQueryAttention) else 1
    return GroupedAttention(
        flops_per_token=_number(projections / linear_speedup + context),
        weight_bytes=_number(moe.attention_parameters * weight_bytes_per_element / group_size),
        context_bytes=_number(attention.cache_elements * context_tokens * bytes_per_element / copies),
        vector_bytes=_number(moe.hidden_size * bytes_per_element),
        groups=_number(float(groups)),
        all_reduce=all_reduce,
        closing=closing,
    )


def _number(value: float) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)
