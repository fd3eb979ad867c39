"""A MoE model: its sizes, those of its attention, and how many weights they come to."""

from dataclasses import dataclass, field, replace

from jaxmoe.errors import InputError
from jaxmoe.models.element_bytes import ElementBytes


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Query heads in equal groups that share a key and a value head; as many of both is multi-head attention.

    Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245.
    """

    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None  # tokens before it that a token reads in `windowed_layers`, where it reads all elsewhere
    windowed_layers: int = 0

    def windows(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Pairs of a window, 0 for none, and how many of so many layers have it."""
        pairs = ((0, layers - self.windowed_layers), (self.window or 0, self.windowed_layers))
        return tuple(pair for pair in pairs if pair[1])

    def parameters(self, hidden_size: int) -> int:
        """Weights of the query, key, value and output projections."""
        return 2 * (self.heads + self.kv_heads) * self.head_size * hidden_size

    @property
    def cache_elements(self) -> int:
        """Elements of the KV cache for one token of context in one layer: keys and values of all KV heads."""
        return 2 * self.kv_heads * self.head_size

    @property
    def context_products(self) -> int:
        """Multiplications of one token with one of its context: scores, then the weighted sum of values."""
        return 2 * self.heads * self.head_size


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values, and queries where `q_rank` is given, come from short vectors.

    A head compares `nope_size` elements without position and `rope_size` with it; the key's are common to all heads.
    DeepSeek-AI, "DeepSeek-V2", section 2.1, https://arxiv.org/abs/2405.04434.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int
    attends: int | None = None  # tokens of its context that a token reads at most, as an indexer picks them; None: all

    def parameters(self, hidden_size: int) -> int:
        """Weights of the projections down to the ranks and up again, and of the output."""
        query_size = self.heads * (self.nope_size + self.rope_size)
        query = hidden_size * query_size if self.q_rank is None else self.q_rank * (hidden_size + query_size)
        down = hidden_size * (self.kv_rank + self.rope_size)
        up = self.kv_rank * self.heads * (self.nope_size + self.value_size)
        return query + down + up + self.heads * self.value_size * hidden_size

    @property
    def cache_elements(self) -> int:
        """Elements of the KV cache for one token of context in one layer: its latent vector and the shared key with
        rotary position."""
        return self.kv_rank + self.rope_size

    @property
    def context_products(self) -> int:
        """Multiplications of one token with one of its context.

        Heads work on the short vectors themselves, the projections up being absorbed into those of queries and
        output: scores over both parts, then the weighted sum of short vectors.
        """
        return self.heads * (2 * self.kv_rank + self.rope_size)


Attention = GroupedQueryAttention | LatentAttention


# What a Mixture-of-Experts model is made of: its layers, experts, attention and vocabulary, as sizes.


class ModelError(InputError):
    """A model that is not described, or not as needed. The message names the place, the value and the remedy."""


@dataclass(frozen=True)
class SharedExperts:
    """The experts of a layer that every token passes."""

    count: int
    size: int  # intermediate size of one


@dataclass(frozen=True)
class MoEModel:
    """Sizes of a model. `moe_layer_ids` are the layers with routed experts, as numbered in the full model.

    The other ones of `num_layers` are dense. What is `None` is absent or not known; counts of parameters need
    the attention, the vocabulary and, with dense layers, their size, and raise `ModelError` without.

    Counted are the weights of matrices. Norms and biases are not: they stay below 0.1 % in the models known here.
    Nor are parts beside the layers: vision encoders, layers that predict further tokens; nor what some models have
    in place of attention.
    """

    name: str
    hidden_size: int
    expert_size: int  # intermediate size of one routed expert
    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    num_layers: int
    shared_experts: SharedExperts | None = None
    dense_size: int | None = None  # intermediate size of the FFN of a dense layer
    # A token's experts come from its `groups_per_token` best of `expert_groups` equal groups.
    expert_groups: int = 1
    groups_per_token: int = 1
    attention: Attention | None = None
    attention_layers: int | None = None  # how many layers have it; `None` for all
    vocabulary_size: int | None = None
    tied_embeddings: bool = False  # one table at both ends of the model
    bytes: ElementBytes = field(default_factory=ElementBytes)

    @property
    def expert_parameters(self) -> int:
        """Weights of one gated expert: gate, up and down projections."""
        return self._ffn(self.expert_size)

    @property
    def shared_expert_parameters(self) -> int:
        """Weights of all shared experts of one MoE layer."""
        return 0 if self.shared_experts is None else self.shared_experts.count * self._ffn(self.shared_experts.size)

    @property
    def known_attention(self) -> Attention:
        """The attention of a layer. Raises `ModelError` where it is not given."""
        if self.attention is None:
            raise self._lacks("attention")
        return self.attention

    @property
    def attention_parameters(self) -> int:
        """Weights of the attention of one layer. Raises `ModelError` where it is not given."""
        return self.known_attention.parameters(self.hidden_size)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the tables at both ends. Raises `ModelError` without a vocabulary."""
        if self.vocabulary_size is None:
            raise self._lacks("vocabulary_size")
        return (1 if self.tied_embeddings else 2) * self.vocabulary_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Weights of the whole model. Raises `ModelError` where one of its parts is not given."""
        router = self.num_experts * self.hidden_size
        moe = self.num_experts * self.expert_parameters + self.shared_expert_parameters + router
        attention = self.num_attention_layers * self.attention_parameters
        return len(self.moe_layer_ids) * moe + self._dense_layers() + attention + self.embedding_parameters

    def context_read(self, context: float | int) -> float | int:
        """Tokens that one token reads of so many in its context, on average over layers with attention."""
        attention, layers = self.attention, self.num_attention_layers
        if isinstance(attention, GroupedQueryAttention):
            return sum(count * min(context, window or context) for window, count in attention.windows(layers)) / layers
        return context if attention is None or attention.attends is None else min(context, attention.attends)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention; the other ones mix tokens in ways that are not described."""
        return self.num_layers if self.attention_layers is None else self.attention_layers

    def with_draft_layer(self) -> "MoEModel":
        """The model with a layer that predicts a further token (MTP), which is as its last ones, and after them."""
        routed = (*self.moe_layer_ids, self.num_layers) if self.moe_layer_ids else ()
        attention = None if self.attention_layers is None else self.attention_layers + 1
        return replace(self, num_layers=self.num_layers + 1, moe_layer_ids=routed, attention_layers=attention)

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - len(self.moe_layer_ids)

    @property
    def dense_ffn_parameters(self) -> int:
        """Weights of the FFN of one dense layer, 0 without such layers. Raises `ModelError` where not given."""
        if self.num_dense_layers and self.dense_size is None:
            raise self._lacks("dense_size")
        return self._ffn(self.dense_size or 0)

    def _dense_layers(self) -> int:
        return self.num_dense_layers * self.dense_ffn_parameters

    def _ffn(self, size: int) -> int:
        return 3 * self.hidden_size * size

    def _lacks(self, key: str) -> ModelError:
        return ModelError(
            f"{self.name}: {key} is not given, so its parameters cannot be counted; add {key} to the model"
        )


def dense_model(name: str, hidden: int, layers: int, ffn: int, vocabulary: int, attention: Attention) -> MoEModel:
    """A model without routed experts: each of its layers has one gated FFN of `ffn` elements."""
    return MoEModel(
        name=name,
        hidden_size=hidden,
        expert_size=ffn,
        num_experts=1,
        top_k=1,
        moe_layer_ids=(),
        num_layers=layers,
        dense_size=ffn,
        attention=attention,
        vocabulary_size=vocabulary,
    )
