"""Models from the config.json that Hugging Face has beside their weights, read by what its fields mean.

The family of a model is not asked. Fields that only some families have say what these do: dense layers, latent
attention, layers without attention. What the fields do not tell has to be given otherwise.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.models.config_fields import (
    DENSE_FIRST,
    DENSE_SIZE,
    EXPERT_SIZE,
    GROUPS,
    GROUPS_PER_TOKEN,
    HEAD_SIZE,
    HEADS,
    HIDDEN_SIZE,
    KV_HEADS,
    MEANINGS,
    MOST_LAYERS,
    NUM_EXPERTS,
    NUM_LAYERS,
    REMEDY,
    SHARED_COUNT,
    SHARED_SIZE,
    TOP_K,
    VOCABULARY,
    Fields,
    Meaning,
    how_to_tell,
    shown,
)
from jaxmoe.models.element_bytes import UNQUANTISED, ElementBytes, QuantisationError, bytes_of_dtype, quantised
from jaxmoe.models.moe import Attention, GroupedQueryAttention, LatentAttention, ModelError, MoEModel, SharedExperts


@dataclass(frozen=True)
class ReadModel:
    """A model, the fields that each of its keys was read from, and parts of the published model that it leaves out."""

    model: MoEModel
    read_from: dict[str, str]
    not_counted: tuple[str, ...]


def from_hugging_face(config: dict[str, Any], name: str) -> MoEModel:
    """The model that the content of a config.json describes. Raises `ModelError` as `read_fields` does."""
    return read_fields(config, name).model


def read_fields(config: dict[str, Any], name: str, given: Mapping[str, Any] | None = None) -> ReadModel:
    """The model that the content of a config.json describes, and how it was read.

    `given` are keys of the model that are written elsewhere, so that no field has to tell them. Raises `ModelError` for
    a dense model, for values that are wrong, and for what no field tells.
    """
    fields = Fields.of(config, given or {})
    num_experts, num_layers = _num_experts(fields), fields.required(NUM_LAYERS, most=MOST_LAYERS)
    moe_layers, groups = _moe_layers(fields, num_layers), _groups(fields, num_experts)
    expert_size, mixers = fields.required(EXPERT_SIZE), _mixers(fields, num_layers)
    model = MoEModel(
        name=name,
        hidden_size=fields.required(HIDDEN_SIZE),
        expert_size=expert_size,
        num_experts=num_experts,
        top_k=fields.required(TOP_K, most=num_experts),
        moe_layer_ids=moe_layers,
        num_layers=num_layers,
        shared_experts=_shared_experts(fields, expert_size),
        dense_size=fields.number(DENSE_SIZE) if len(moe_layers) < num_layers else None,
        expert_groups=groups[0],
        groups_per_token=groups[1],
        attention=_attention(fields, num_layers),
        attention_layers=None if mixers is None or {*mixers} == {"attention"} else mixers.count("attention"),
        vocabulary_size=fields.number(VOCABULARY),
        tied_embeddings=fields.flag("tied_embeddings", "tie_word_embeddings"),
        bytes=_bytes(fields, moe_layers[len(moe_layers) // 2]),
    )
    told = {key for key, value in fields.given.items() if isinstance(value, int | list)}  # as a whole, elsewhere
    read = {key: ", ".join(dict.fromkeys(paths)) for key, paths in fields.read.items() if key not in told}
    return ReadModel(model, read, tuple(_not_counted(fields, model, mixers)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError`, which leaves naming the file to the caller."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError("no such file; check the path") from None
    except OSError as error:
        raise ModelError(f"not readable ({error.strerror}); expected a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not valid JSON ({error}); get the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"holds a {type(content).__name__}, expected an object; {REMEDY}")
    return content


def name_of(path: Path) -> str:
    """Returns the model's name: the file name without suffix; for a `config.json`, the name of its folder."""
    return path.absolute().parent.name if path.name == "config.json" else path.stem


def _num_experts(fields: Fields) -> int:
    """The number of routed experts; some families write 0 or null for a dense model."""
    number = fields.number(NUM_EXPERTS, least=0)
    null = next((name for name in NUM_EXPERTS.names if name in fields.values), None)
    if number == 0 or (number is None and null is not None):
        said = fields.read.get("num_experts", [null])[0]
        raise ModelError(f"{said} is {'null' if number is None else 0}: the model is dense; use one with experts")
    return fields.required(NUM_EXPERTS)


# Steps from one layer with experts to the next, by the field that states them: from the first layer, or by the last of
# each step.
FROM_FIRST = ("moe_layer_freq",)
BLOCKS = "hybrid_override_pattern"
BY_LAST = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")


def _moe_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers with experts: those that no field takes out."""
    key, every = "moe_layer_ids", set(range(num_layers))
    if fields.value(BLOCKS) is not None and not {key, "attention_layers"} <= fields.given.keys():
        raise ModelError(
            f"{fields.path(BLOCKS)} says of what kind each layer is, in letters that are not known; write {key}: "
            "{first: NUMBER, count: NUMBER, skip: [..]} and attention_layers: NUMBER in a YAML file with base: "
            f"THIS_FILE, or give a scenario --set 'model.{key}={{first: .., ..}}' --set model.attention_layers=NUMBER"
        )
    left = [every, *_stated_layers(fields, num_layers)]
    listed = fields.layers(key, "moe_layers", num_layers)
    listed = fields.layers(key, "moe_layers_enum", num_layers) if listed is None else listed
    if listed is not None:
        left.append(set(listed))
    for name in (*FROM_FIRST, *BY_LAST):
        if isinstance(fields.value(name), list) or (name == "interleave_moe_layer_step" and listed is not None):
            continue
        step, start = fields.named(key, name), 0 if name in FROM_FIRST else 1
        left.append({layer for layer in every if step is None or (layer + start) % step == 0})
    layers = set.intersection(*left)
    if layers or key in fields.given:
        return tuple(sorted(layers or every))
    told = " and ".join(dict.fromkeys(fields.read[key]))
    raise ModelError(f"by {told} none of the {num_layers} layers has experts: the model is dense; use one with experts")


def _stated_layers(fields: Fields, num_layers: int) -> Iterator[set[int]]:
    """Layers that may have experts by each field that takes some out."""
    key, every = "moe_layer_ids", set(range(num_layers))
    if (first := fields.number(DENSE_FIRST, least=0)) is not None:
        yield {layer for layer in every if layer >= first}
    if (start := fields.named(key, "moe_layer_start_index", 0)) is not None:
        end = fields.named(key, "moe_layer_end_index", -1)
        yield {layer for layer in every if start <= layer and (end in (None, -1) or layer <= end)}
    if (period := fields.named(key, "expert_layer_period")) is not None:
        offset = fields.named(key, "expert_layer_offset", 0) or 0
        yield {layer for layer in every if layer % period == offset % period}
    yield every - set(fields.layers(key, "mlp_only_layers", num_layers) or ())
    if (flags := fields.by_layer(key, "moe_layer_freq", num_layers)) is not None:
        yield {layer for layer, flag in enumerate(flags) if flag}
    if (kinds := fields.by_layer(key, "mlp_layer_types", num_layers)) is not None:
        yield {layer for layer, kind in enumerate(kinds) if kind != "dense"}


def _groups(fields: Fields, num_experts: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may choose from; one where the choice is called greedy."""
    if fields.value("topk_method") == "greedy":
        return 1, 1
    groups = fields.number(GROUPS, most=num_experts) or 1
    return groups, fields.number(GROUPS_PER_TOKEN, most=groups) or 1


def _shared_experts(fields: Fields, expert_size: int) -> SharedExperts | None:
    """Shared experts, as wide as routed ones where no width is stated, and one where no number is."""
    count, size = fields.number(SHARED_COUNT, least=0), fields.number(SHARED_SIZE, least=0)
    if count is None and size is None and fields.noted("shared_experts", "intermediate_size_mlp") is not None:
        count = 1  # Llama 4, whose dense layers have this width, has a shared expert that no field tells
    if count is None and size:
        count = 1
    if not count or size == 0 or fields.value("use_mixed_mlp_moe") is False:
        return None
    return SharedExperts(count, size or expert_size)


def _attention(fields: Fields, num_layers: int) -> Attention | None:
    """Latent attention where a rank of keys and values is stated, else grouped-query; `None` without heads."""
    heads = fields.number(HEADS)
    if heads is None:
        return None
    if fields.value("kv_lora_rank") is not None and fields.value("use_mla") is not False:
        return _latent(fields, heads)
    head_size = fields.number(HEAD_SIZE) or fields.required(HIDDEN_SIZE) // heads
    kv_heads = fields.number(KV_HEADS, most=heads) or heads
    return GroupedQueryAttention(heads, kv_heads, max(head_size, 1), *_window(fields, num_layers))


def _window(fields: Fields, num_layers: int) -> tuple[int | None, int]:
    """The window of attention and how many layers have it, where both are stated."""
    kinds = fields.by_layer("attention", "layer_types", num_layers) or ()
    layers = sum("sliding" in str(kind) for kind in kinds)
    window = fields.named("attention", "sliding_window") if layers else None
    return (None, 0) if window is None else (window, layers)


def _latent(fields: Fields, heads: int) -> LatentAttention:
    def size(name: str) -> int:
        return fields.required(Meaning("attention", f"{name} of latent attention", (name,)))

    if "q_lora_rank" not in fields.values:  # what it is by default depends on the version of the library
        raise ModelError(f"q_lora_rank is missing; write null where queries have no rank, or {REMEDY}")
    return LatentAttention(
        heads=heads,
        q_rank=fields.named("attention", "q_lora_rank"),
        kv_rank=size("kv_lora_rank"),
        nope_size=size("qk_nope_head_dim"),
        rope_size=size("qk_rope_head_dim"),
        value_size=size("v_head_dim"),
        attends=fields.named("attention", "index_topk"),
    )


def _mixers(fields: Fields, num_layers: int) -> list[str] | None:
    """The mixer of tokens of every layer, `attention` or another name; `None` where no field tells."""
    key, every = "attention_layers", range(num_layers)
    if key in fields.given:
        return None
    for name in ("layer_types", "layers_block_type"):
        if (kinds := fields.by_layer(key, name, num_layers)) is not None:
            return ["attention" if re.search("attention|hybrid", str(kind)) and "linear" not in str(kind) else str(kind)
                    for kind in kinds]  # fmt: skip
    if (flags := fields.by_layer(key, "attn_type_list", num_layers)) is not None:
        return ["attention" if flag == 1 else "linear_attention" for flag in flags]
    if (interval := fields.named(key, "full_attention_interval")) is not None:
        return ["linear_attention" if (layer + 1) % interval else "attention" for layer in every]
    if (period := fields.named(key, "attn_layer_period")) is not None:
        offset = fields.named(key, "attn_layer_offset", 0) or 0
        return ["mamba" if (layer - offset) % period else "attention" for layer in every]
    return None


def _bytes(fields: Fields, layer: int) -> ElementBytes:
    """Bytes of elements by the data type and the quantisation of a layer; 2 where no type is stated."""
    dtype = fields.noted("bytes", "torch_dtype") or fields.noted("bytes", "dtype")
    unquantised = UNQUANTISED if dtype is None else bytes_of_dtype(dtype)
    quantisation = fields.value("quantization_config") or {}
    try:
        if unquantised is None:
            raise QuantisationError(f"the data type of the file is {shown(dtype)}, whose bytes are not known")
        if not isinstance(quantisation, dict):
            raise QuantisationError(f"quantization_config is {shown(quantisation)}, expected an object")
        if not quantisation:
            return ElementBytes(*[unquantised] * 5)
        fields.noted("bytes", "quantization_config")
        return quantised(unquantised, quantisation, layer)
    except QuantisationError as error:
        if "bytes" in fields.given:
            return ElementBytes()
        raise ModelError(f"{error}; {how_to_tell('bytes', '{experts: NUMBER}')}") from None


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
BESIDE = re.compile(r"vision|visual|audio|speech|image|video|vae|talker|code2wav")
SIZES = re.compile(r"(size|dim|rank|width|heads|layers|experts|blocks|expand|state|kernel)s?$")
NO_WEIGHTS = re.compile(
    r"max|position|window|block_size|ep_size|_pos|rope|rotary|head_dim$|sliding|chunk|^index_|^mtp_"
)
OF_MIXERS = re.compile(r"^(linear|mamba|ssm|conv)_")


def _not_counted(fields: Fields, model: MoEModel, mixers: list[str] | None) -> Iterator[str]:
    """Parts of the published model that the description leaves out, each with the field that tells of it."""
    for name in FURTHER:
        number = fields.value(name)
        if type(number) is int and number > 0 and fields.value("use_mtp") is not False:
            yield f"{number} x what predicts further tokens ({fields.path(name)})"
    for name, (path, value) in fields.values.items():
        if isinstance(value, dict) and BESIDE.search(name):
            yield f"the part that {path} describes"
    if fields.value("index_n_heads"):
        yield f"the indexer of sparse attention ({fields.path('index_n_heads')})"
    others = Counter(kind for kind in mixers or () if kind != "attention")
    told = fields.read.get("attention_layers", [""])[0]
    yield from (f"{kind} in {count} of {model.num_layers} layers ({told})" for kind, count in others.items())
    if model.attention is None:
        yield f"attention (no field of {', '.join(HEADS.names)})"
    elif fields.value("attn_output_gate") or fields.value("linear_num_value_heads"):
        yield "the output gate of the attention"
    if model.vocabulary_size is None:
        yield f"embeddings (no field of {', '.join(VOCABULARY.names)})"
    kinds = _listed(fields.value("layer_types"))
    read = isinstance(model.attention, GroupedQueryAttention) and model.attention.window
    if windows := [kind for kind in kinds if re.search("chunked" if read else "sliding|chunked", str(kind))]:
        yield f"the window of {len(windows)} layers, which read the whole context here ({fields.path('layer_types')})"
    if unread := [path for name, path in _unread_sizes(fields) if not (others and OF_MIXERS.search(name))]:
        yield f"what these sizes belong to: {', '.join(unread)}"


def _unread_sizes(fields: Fields) -> Iterator[tuple[str, str]]:
    """Name and path of fields that look like sizes of weights, and stand for nothing that is known."""
    known = {name for meaning in MEANINGS for name in (*meaning.names, *meaning.last)} | {*FURTHER}
    read = {path for paths in fields.read.values() for path in paths}
    for name, (path, value) in fields.values.items():
        is_size = SIZES.search(name) and not NO_WEIGHTS.search(name) and type(value) is int and value > 0
        if is_size and path not in read and name not in known:
            yield name, path
