"""What a Mixture-of-Experts model is made of: its layers, experts, attention and vocabulary, as sizes."""

from dataclasses import dataclass

from jaxmoe.errors import InputError
from jaxmoe.models.attention import Attention


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
    Nor are parts beside the layers: vision encoders, layers that predict further tokens.
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
    vocabulary_size: int | None = None
    tied_embeddings: bool = False  # one table at both ends of the model

    @property
    def expert_parameters(self) -> int:
        """Weights of one gated expert: gate, up and down projections."""
        return self._ffn(self.expert_size)

    @property
    def shared_expert_parameters(self) -> int:
        """Weights of all shared experts of one MoE layer."""
        return 0 if self.shared_experts is None else self.shared_experts.count * self._ffn(self.shared_experts.size)

    @property
    def attention_parameters(self) -> int:
        """Weights of the attention of one layer. Raises `ModelError` where it is not given."""
        if self.attention is None:
            raise self._lacks("attention")
        return self.attention.parameters(self.hidden_size)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the tables at both ends. Raises `ModelError` without a vocabulary."""
        if self.vocabulary_size is None:
            raise self._lacks("vocabulary_size")
        return (1 if self.tied_embeddings else 2) * self.vocabulary_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Weights of the whole model. Raises `ModelError` where one of its parts is not given."""
        return self._with_experts(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Weights that a token has to do with: all but the routed experts that it does not choose.

        Both embedding tables count in full, as with most publishers. Raises `ModelError` as `parameters` does.
        """
        return self._with_experts(self.top_k)

    def _with_experts(self, routed: int) -> int:
        """All weights with this many routed experts in every MoE layer."""
        router = self.num_experts * self.hidden_size
        moe = routed * self.expert_parameters + self.shared_expert_parameters + router
        attention = self.num_layers * self.attention_parameters
        return len(self.moe_layer_ids) * moe + self._dense_layers() + attention + self.embedding_parameters

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
        return ModelError(f"{self.name}: {key} is not given, and its parameters cannot be counted without; add it")
