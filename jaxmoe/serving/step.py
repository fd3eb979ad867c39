"""One forward pass of a whole model as it is deployed: the seconds of each of its parts.

Prompts that are read (prefill) and sequences that get one more token (decode) may share a step, as backends chunk
prompts. Weights are read once for both; each has an attention kernel of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.gpu.latent import LatentSizes
from jaxmoe.hardware.gpu.terms import Numbers
from jaxmoe.models import GroupedQueryAttention, LatentAttention, MoEModel
from jaxmoe.serving.deployment import Deployment, check_deployment
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.kernels import Given, Kernels

# Norms, rotary positions, quantisation and routing of a layer, which no table has: assumed, not fitted.
SMALL_KERNELS = 8
SMALL_SECONDS = 2e-6  # each, in a CUDA graph
HIDDEN_BYTES = 2.0
Parts = Mapping[str, Float[Array, "..."]]


class StepLoad(NamedTuple):
    """Tokens and sequences of a step on each data-parallel rank, of any common shape.

    `decoding` sequences of `context` tokens get one token each; `prefilled` tokens of new prompts of `prompt` tokens
    are read.
    """

    decoding: Given
    context: Given
    prefilled: Given = 0.0
    prompt: Given = 1.0


@dataclass(frozen=True, eq=False)
class ModelStep:
    """A model in a deployment on GPUs whose kernels are known.

    Raises `DeploymentError` for one that cannot be.
    """

    model: MoEModel
    deployment: Deployment
    kernels: Kernels
    gating: ExpertLoadTable

    def __post_init__(self) -> None:
        check_deployment(self.model, self.deployment)

    def seconds(self, batch: StepLoad) -> Float[Array, "..."]:
        """Seconds of a step, all parts one after another."""
        return sum(self.parts(batch).values(), jnp.zeros(()))

    def parts(self, batch: StepLoad) -> dict[str, Float[Array, "..."]]:
        """Seconds of each part of a step, all layers together; latent attention has its projections inside."""
        batch = StepLoad(*(jnp.asarray(number, jnp.float32) for number in batch))
        tokens = batch.decoding + batch.prefilled
        sequences = batch.decoding + batch.prefilled / batch.prompt
        layers, sparse, dense = self.model.num_layers, len(self.model.moe_layer_ids), self.model.num_dense_layers
        parts = {name: layers * seconds for name, seconds in self._attention(batch).items()}
        parts["exchange"] = layers * self._exchange(tokens)
        parts["router"] = sparse * self._product(tokens, self.model.num_experts, self.model.hidden_size, "bfloat16")
        parts["experts"] = sparse * self._experts(tokens)
        if (shared := self.model.shared_experts) is not None:
            parts["shared"] = sparse * self._ffn(tokens, shared.count * shared.size)
        if dense:
            parts["dense"] = dense * self._ffn(tokens, self.model.dense_size or 0)
        parts["small"] = layers * self._small(tokens)
        parts["head"] = self._head(sequences)
        return {name: jnp.where(tokens > 0, seconds, 0.0) for name, seconds in parts.items()}

    def _attention(self, batch: StepLoad) -> dict[str, Float[Array, "..."]]:
        match self.model.attention:
            case LatentAttention() as attention:
                return self._latent(batch, attention)
            case GroupedQueryAttention() as attention:
                return self._grouped(batch, attention)
        raise AssertionError("checked when it was made")

    def _grouped(self, batch: StepLoad, attention: GroupedQueryAttention) -> dict[str, Float[Array, "..."]]:
        cut, tokens = self.deployment.tensor, batch.decoding + batch.prefilled
        heads, kv_heads = attention.heads / cut, max(attention.kv_heads / cut, 1.0)
        size, hidden, precision = attention.head_size, self.model.hidden_size, self.deployment.products
        products = self._product(tokens, (heads + 2 * kv_heads) * size, hidden, precision)
        products += self._product(tokens, hidden, heads * size, precision)
        prompts, scale = _prompts(batch)
        decode, prefill = jnp.zeros(()), jnp.zeros(())
        for window, layers in attention.windows(self.model.num_layers):
            part = layers / self.model.num_layers
            shape = (heads, kv_heads, size, window, self.deployment.cache)
            decode += part * self.kernels.decode(jnp.maximum(batch.decoding, 1.0), batch.context, *shape)
            prefill += part * scale * self.kernels.prefill(prompts, batch.prompt, *shape)
        return {
            "projections": products,
            "decode attention": jnp.where(batch.decoding > 0, decode, 0.0),
            "prefill attention": jnp.where(batch.prefilled > 0, prefill, 0.0),
        }

    def _latent(self, batch: StepLoad, attention: LatentAttention) -> dict[str, Float[Array, "..."]]:
        heads = attention.heads / self.deployment.tensor
        sizes = LatentSizes(
            self.model.hidden_size,
            attention.q_rank or 0,
            attention.kv_rank,
            attention.nope_size,
            attention.rope_size,
            attention.value_size,
        )
        how = (sizes, self.deployment.products, self.deployment.cache)
        prompts, scale = _prompts(batch)
        context = batch.context if attention.attends is None else jnp.minimum(batch.context, attention.attends)
        decode = self.kernels.latent_decode(jnp.maximum(batch.decoding, 1.0), context, heads, *how)
        prefill = scale * self.kernels.latent_prefill(prompts, batch.prompt, heads, *how)
        return {
            "decode attention": jnp.where(batch.decoding > 0, decode, 0.0),
            "prefill attention": jnp.where(batch.prefilled > 0, prefill, 0.0),
        }

    def _exchange(self, tokens: Numbers) -> Float[Array, "..."]:
        """Exchanges of a layer: sums of partial results, or with data-parallel attention all tokens there and back."""
        bytes_ = tokens * self.model.hidden_size * HIDDEN_BYTES
        attention = self.kernels.collective("all_reduce", bytes_, self.deployment.tensor)
        if self.deployment.data == 1:
            return 2 * attention
        everywhere, devices = bytes_ * self.deployment.data, self.deployment.devices
        there = self.kernels.collective("all_gather", everywhere, devices)
        return attention + there + self.kernels.collective("reduce_scatter", everywhere, devices)

    def _experts(self, tokens: Numbers) -> Float[Array, "..."]:
        model, deployment = self.model, self.deployment
        loads = self.gating(tokens * deployment.data)
        inner, experts = model.expert_size / deployment.expert_tensor, model.num_experts / deployment.expert_ranks
        sizes = (model.hidden_size, inner, experts, model.top_k)
        return self.kernels.experts(loads, *sizes, deployment.experts, deployment.expert_ranks > 1)

    def _ffn(self, tokens: Numbers, size: int) -> Float[Array, "..."]:
        own, hidden, precision = size / self.deployment.tensor, self.model.hidden_size, self.deployment.products
        return self._product(tokens, 2 * own, hidden, precision) + self._product(tokens, hidden, own, precision)

    def _small(self, tokens: Numbers) -> Float[Array, "..."]:
        bytes_ = 2 * tokens * self.model.hidden_size * HIDDEN_BYTES
        return SMALL_KERNELS * (SMALL_SECONDS + bytes_ / self.kernels.sheet.bandwidth)

    def _head(self, sequences: Numbers) -> Float[Array, "..."]:
        vocabulary = (self.model.vocabulary_size or 0) / self.deployment.tensor
        return self._product(sequences, max(vocabulary, 1.0), self.model.hidden_size, "bfloat16")

    def _product(self, rows: Numbers, columns: float | int, inner: float | int, precision: str) -> Float[Array, "..."]:
        return self.kernels.product(jnp.maximum(rows, 1.0), columns, inner, precision)


def _prompts(batch: StepLoad) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Whole prompts of a step, and the part of one that is read where a step reads less."""
    whole = batch.prefilled / batch.prompt
    return jnp.maximum(whole, 1.0), jnp.minimum(whole, 1.0)
