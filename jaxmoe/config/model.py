"""A Mixture-of-Experts model as a user describes it. What is not given is not known, and not needed for a layer."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxmoe.config.base import Count, Name, Positive, Section
from jaxmoe.errors import RuleError
from jaxmoe.models import (
    Attention,
    ElementBytes,
    GroupedQueryAttention,
    LatentAttention,
    MoEModel,
    ReadModel,
    SharedExperts,
)
from jaxmoe.models.element_bytes import UNQUANTISED


class LayerRange(Section):
    """The layers with routed experts, as numbered in the full model: `first`, `first + step`, ..., but for `skip`."""

    first: int = Field(default=0, ge=0, description="the number of the first layer with routed experts", examples=[0])
    # A hundred times what models have.
    count: int = Field(ge=1, le=10_000, description="the number of layers in this range", examples=[32])
    step: Count = Field(default=1, description="the distance between the layers of this range", examples=[1])
    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    skip: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        default=(), description="the layers of this range that are dense all the same", examples=[[5]]
    )

    @property
    def ids(self) -> tuple[int, ...]:
        """The layers one by one."""
        return tuple(layer for layer in self._range if layer not in self.skip)

    @property
    def _range(self) -> range:
        return range(self.first, self.first + self.count * self.step, self.step)

    @model_validator(mode="after")
    def _skips_some(self) -> "LayerRange":
        for index, layer in enumerate(self.skip):
            if layer not in self._range:
                raise RuleError(("skip", index), layer, "a layer of the range", "Name only layers of the range")
        if not self.ids:
            raise RuleError(("skip",), list(self.skip), "fewer layers than the range has", "Keep a layer with experts")
        return self


class SharedExpertsConfig(Section):
    """The experts of a layer that every token passes."""

    count: Count = Field(description="the number of shared experts of a layer", examples=[2])
    size: Count = Field(description="the intermediate size of one shared expert", examples=[1408])


class GroupedQueryConfig(Section):
    """Attention whose query heads share keys and values in equal groups."""

    kind: Literal["grouped_query"] = Field(description="the kind of attention", examples=["grouped_query"])
    heads: Count = Field(description="the number of query heads", examples=[32])
    kv_heads: Count = Field(description="the number of key and value heads", examples=[8])
    head_size: Count = Field(description="the length of one head", examples=[128])
    window: Count | None = Field(
        default=None,
        description="the number of tokens before it that a token reads in windowed_layers, or null for all",
        examples=[128],
    )
    windowed_layers: Annotated[int, Field(ge=0)] = Field(
        default=0, description="the number of layers whose tokens read a window alone", examples=[18]
    )

    @model_validator(mode="after")
    def _windows_have_a_size(self) -> "GroupedQueryConfig":
        if self.windowed_layers and self.window is None:
            raise RuleError(("window",), None, "a number of tokens", "Give window, or leave windowed_layers out")
        return self

    @model_validator(mode="after")
    def _groups_are_equal(self) -> "GroupedQueryConfig":
        if self.heads % self.kv_heads:
            raise RuleError(("kv_heads",), self.kv_heads, f"a divisor of heads, {self.heads}", "Correct one of them")
        return self


class LatentConfig(Section):
    """Multi-head latent attention, as in DeepSeek-V2."""

    kind: Literal["latent"] = Field(description="the kind of attention", examples=["latent"])
    heads: Count = Field(description="the number of heads", examples=[128])
    q_rank: Count | None = Field(
        default=None, description="the length of the vector that queries come from, or null for none", examples=[1536]
    )
    kv_rank: Count = Field(description="the length of the vector that keys and values come from", examples=[512])
    nope_size: Count = Field(description="the part of a head's query without position", examples=[128])
    rope_size: Count = Field(description="the part of a head's query with position", examples=[64])
    value_size: Count = Field(description="the length of a head's value", examples=[128])
    attends: Count | None = Field(
        default=None,
        description="the number of tokens of its context that a token reads at most, or null for all",
        examples=[2048],
    )


class BytesConfig(Section):
    """Bytes of one element of each kind of data, scales included."""

    experts: Positive = Field(
        default=UNQUANTISED, description="the bytes of one weight of a routed expert", examples=[1]
    )
    dense: Positive = Field(
        default=UNQUANTISED, description="the bytes of one weight of a dense layer or a shared expert", examples=[1]
    )
    attention: Positive = Field(
        default=UNQUANTISED, description="the bytes of one weight of the attention", examples=[1]
    )
    activations: Positive = Field(
        default=UNQUANTISED, description="the bytes of one element of a hidden vector on a link", examples=[2]
    )
    kv: Positive = Field(default=UNQUANTISED, description="the bytes of one element of a key or value", examples=[2])


class ModelConfig(Section):
    """Sizes of a Mixture-of-Experts model. A layer's time and memory need those without a default."""

    name: Name = Field(default="unnamed", description="a name for tables", examples=["mixtral-8x7b"])
    hidden_size: Count = Field(description="the length of a token's hidden vector", examples=[4096])
    expert_size: Count = Field(description="the intermediate size of one routed expert", examples=[14336])
    # Traces hold expert ids as int16.
    num_experts: int = Field(ge=1, le=2**15, description="the number of routed experts of a layer", examples=[8])
    top_k: Count = Field(description="the number of experts that a token chooses", examples=[2])
    moe_layer_ids: LayerRange = Field(
        description="the layers with routed experts as a mapping, for example {first: 0, count: 32}"
    )
    num_layers: Count | None = Field(
        default=None,
        description="the number of all layers, or null if none follows the last with experts",
        examples=[32],
    )
    shared_experts: SharedExpertsConfig | None = Field(
        default=None, description="the shared experts of a layer as {count: .., size: ..}, or null for none"
    )
    dense_size: Count | None = Field(
        default=None, description="the intermediate size of a dense layer, or null if not known", examples=[10944]
    )
    expert_groups: Count = Field(
        default=1, description="the number of equal groups of experts that routing is limited by", examples=[8]
    )
    groups_per_token: Count = Field(
        default=1, description="the number of groups that a token's experts may come from", examples=[4]
    )
    attention: Annotated[GroupedQueryConfig | LatentConfig, Field(discriminator="kind")] | None = Field(
        default=None,
        description="the attention as a mapping, {kind: grouped_query, ..} or {kind: latent, ..}, or null if not known",
    )
    attention_layers: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="the number of layers that have this attention, or null for all", examples=[12]
    )
    vocabulary_size: Count | None = Field(
        default=None, description="the number of tokens in the vocabulary, or null if not known", examples=[32000]
    )
    tied_embeddings: bool = Field(
        default=False, description="whether both ends of the model have the same embedding table", examples=[False]
    )

    bytes: BytesConfig = Field(
        default=BytesConfig(), description="the bytes of one element by kind of data, 2 where a kind is left out"
    )
    read_from: dict[str, str] = Field(
        default={}, description="the fields of a config.json that keys were read from, as a mapping"
    )
    # Strict mode would refuse the list that YAML gives; the entries stay strict.
    not_counted: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="the parts of the published model that are left out here", examples=[["vision encoder"]]
    )

    @model_validator(mode="after")
    def _enough_experts(self) -> "ModelConfig":
        if self.top_k > self.num_experts:
            most = f"at most num_experts, {self.num_experts}"
            raise RuleError(("top_k",), self.top_k, most, "Lower top_k or raise num_experts")
        return self

    @model_validator(mode="after")
    def _enough_layers(self) -> "ModelConfig":
        last = self.moe_layer_ids.ids[-1]
        if self.num_layers is not None and self.num_layers <= last:
            least = f"more than {last}, the last of moe_layer_ids"
            raise RuleError(("num_layers",), self.num_layers, least, "Raise it or correct moe_layer_ids")
        return self

    @model_validator(mode="after")
    def _windows_in_layers(self) -> "ModelConfig":
        layers = self.attention_layers or self.num_layers or self.moe_layer_ids.ids[-1] + 1
        if isinstance(self.attention, GroupedQueryConfig) and self.attention.windowed_layers > layers:
            keys, most = ("attention", "windowed_layers"), f"at most the {layers} layers with attention"
            raise RuleError(keys, self.attention.windowed_layers, most, "Lower it")
        return self

    @model_validator(mode="after")
    def _attention_in_layers(self) -> "ModelConfig":
        layers = self.num_layers or self.moe_layer_ids.ids[-1] + 1
        if self.attention_layers is not None and self.attention_layers > layers:
            most = f"at most the {layers} layers of the model"
            raise RuleError(("attention_layers",), self.attention_layers, most, "Lower it, or write null for all")
        return self

    @model_validator(mode="after")
    def _groups_hold_the_choice(self) -> "ModelConfig":
        groups, per_token = self.expert_groups, self.groups_per_token
        if self.num_experts % groups:
            equal = f"a divisor of num_experts, {self.num_experts}"
            raise RuleError(("expert_groups",), groups, equal, "Write 1 where routing is not limited by groups")
        if per_token > groups:
            most = f"at most expert_groups, {groups}"
            raise RuleError(("groups_per_token",), per_token, most, "Lower it or raise expert_groups")
        if per_token * self.num_experts // groups < self.top_k:
            enough = f"groups that have top_k, {self.top_k}, experts together"
            raise RuleError(("groups_per_token",), per_token, enough, "Raise it or lower expert_groups")
        return self


def build_model(model: ModelConfig) -> MoEModel:
    """The sizes of the model."""
    layers, shared = model.moe_layer_ids.ids, model.shared_experts
    return MoEModel(
        name=model.name,
        hidden_size=model.hidden_size,
        expert_size=model.expert_size,
        num_experts=model.num_experts,
        top_k=model.top_k,
        moe_layer_ids=layers,
        num_layers=model.num_layers or layers[-1] + 1,
        shared_experts=None if shared is None else SharedExperts(shared.count, shared.size),
        dense_size=model.dense_size,
        expert_groups=model.expert_groups,
        groups_per_token=model.groups_per_token,
        attention=_built(model.attention),
        attention_layers=model.attention_layers,
        vocabulary_size=model.vocabulary_size,
        tied_embeddings=model.tied_embeddings,
        bytes=ElementBytes(**{name: getattr(model.bytes, name) for name in BytesConfig.model_fields}),
    )


def describe_model(model: MoEModel) -> dict[str, Any]:
    """The mapping that a user would write for a model."""
    attention = None if model.attention is None else {"kind": _kind(model.attention), **asdict(model.attention)}
    return asdict(model) | {"moe_layer_ids": _as_range(model.moe_layer_ids), "attention": attention}


def describe_read(read: ReadModel) -> dict[str, Any]:
    """The mapping for a model that was read from a config.json, with how it was read."""
    return describe_model(read.model) | {"read_from": read.read_from, "not_counted": list(read.not_counted)}


def told_reading(model: ModelConfig) -> list[str]:
    """Lines that tell which fields of a config.json were read as what, and which parts of it are left out."""
    lines = []
    if model.read_from:
        told = (f"{key}{_number(getattr(model, key))} from {fields}" for key, fields in model.read_from.items())
        lines.append(f"{model.name}: read by its fields: {'; '.join(told)}")
    if model.not_counted:
        lines.append(f"{model.name}: not counted: {'; '.join(model.not_counted)}")
    return lines


def _number(value: object) -> str:
    """A number as it stands after its key; nothing for what is no number."""
    return f" {value}" if type(value) is int else ""


def _built(attention: GroupedQueryConfig | LatentConfig | None) -> Attention | None:
    match attention:
        case GroupedQueryConfig():
            return GroupedQueryAttention(**attention.model_dump(exclude={"kind"}))
        case LatentConfig():
            return LatentAttention(**attention.model_dump(exclude={"kind"}))
    return None


def _kind(attention: Attention) -> str:
    return "grouped_query" if isinstance(attention, GroupedQueryAttention) else "latent"


def _as_range(layers: tuple[int, ...]) -> dict[str, Any]:
    """The range of these ascending layers: evenly spaced if they are, or else from first to last with gaps."""
    first, last = layers[0], layers[-1]
    step = layers[1] - first if len(layers) > 1 else 1
    if layers != tuple(range(first, last + 1, step)):
        step = 1
    every = range(first, last + 1, step)
    return {
        "first": first,
        "count": len(every),
        "step": step,
        "skip": [layer for layer in every if layer not in layers],
    }
