"""Models from the config.json that Hugging Face has beside their weights; its `model_type` says how to read it.

Keys may be absent where every version of the family's code has the same default; then that is what counts.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmoe.models.moe import Attention, GroupedQueryAttention, LatentAttention, ModelError, MoEModel, SharedExperts

MOST_LAYERS = 10_000  # a hundred times what models have
REMEDY = "use the config.json that was published with the model"


def from_hugging_face(config: dict[str, Any], name: str) -> MoEModel:
    """The model that the content of a config.json describes.

    Raises `ModelError` for a family that is not known, a dense model, and keys that are missing or wrong.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"model_type is {json.dumps(family)}, expected one of {', '.join(FAMILIES)}; "
            "describe another Mixture-of-Experts model in YAML"
        )
    return FAMILIES[family](_Keys(config), name)


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


@dataclass(frozen=True)
class _Keys:
    """Checked access to the values of an object. `above` leads to it from the top of the file."""

    values: dict[str, Any]
    above: str = ""

    def count(self, key: str, least: int = 1, most: int | None = None) -> int:
        """Returns a required integer. Raises `ModelError` where it is missing or outside `least` to `most`."""
        value = self._present(key)
        # A boolean is an int to Python.
        if type(value) is not int or value < least or (most is not None and value > most):
            within = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self._wrong(key, f"a whole number {within}")
        return value

    def count_or(self, key: str, default: int, least: int = 1, most: int | None = None) -> int:
        """Returns an integer, or `default` where it is missing or null."""
        return default if self.values.get(key) is None else self.count(key, least, most)

    def count_or_null(self, key: str, least: int = 1) -> int | None:
        """Returns an integer, or `None` for null. The key is required: its default depends on the library's version."""
        return None if self._present(key) is None else self.count(key, least)

    def experts(self, key: str) -> int:
        """The number of routed experts; some families write 0 or null for a dense model."""
        if self._present(key) in (0, None):
            raise ModelError(f"{self.above}{key} is {self._shown(key)}: the model is dense; use one with experts")
        return self.count(key)

    def flag(self, key: str) -> bool:
        """True or false, false if it is missing."""
        if not isinstance(self.values.get(key, False), bool):
            raise self._wrong(key, "true or false")
        return self.values.get(key, False)

    def layers(self, key: str, num_layers: int) -> list[int] | None:
        """A list of layer numbers, `None` if it is missing or null."""
        layers = self.values.get(key)
        if layers is None:
            return None
        if not isinstance(layers, list) or any(type(n) is not int or not 0 <= n < num_layers for n in layers):
            raise self._wrong(key, f"a list of layer numbers below {num_layers}")
        return layers

    def section(self, key: str) -> "_Keys":
        """The object under a key."""
        value = self._present(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return _Keys(value, f"{self.above}{key}.")

    def _present(self, key: str) -> Any:
        if key not in self.values:
            raise ModelError(f"{self.above}{key} is missing; {REMEDY}")
        return self.values[key]

    def _wrong(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.above}{key} is {self._shown(key)}, expected {expected}; {REMEDY}")

    def _shown(self, key: str) -> str:
        try:
            text = json.dumps(self.values[key])
        except RecursionError:  # parsed a few levels nearer to the limit than this is
            return "nested too deeply"
        return text if len(text) <= 60 else text[:57] + "..."


def _model(keys: _Keys, name: str, experts: str, expert_size: str, attention: Attention) -> MoEModel:
    """The model from keys that most Hugging Face families share, with experts in every layer.

    `experts` and `expert_size` are the two keys whose names differ: number of experts, and intermediate size of one.
    """
    num_experts, num_layers = keys.experts(experts), keys.count("num_hidden_layers", most=MOST_LAYERS)
    return MoEModel(
        name=name,
        hidden_size=keys.count("hidden_size"),
        expert_size=keys.count(expert_size),
        num_experts=num_experts,
        top_k=keys.count("num_experts_per_tok", most=num_experts),
        moe_layer_ids=tuple(range(num_layers)),
        num_layers=num_layers,
        attention=attention,
        vocabulary_size=keys.count("vocab_size"),
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )


def _grouped_query(keys: _Keys, head_size: int | None = None) -> GroupedQueryAttention:
    """Grouped-query attention. The head size is `head_size` or the file's `head_dim`, else hidden size / heads."""
    heads, hidden_size = keys.count("num_attention_heads"), keys.count("hidden_size")
    return GroupedQueryAttention(
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", most=heads),
        head_size=head_size or keys.count_or("head_dim", hidden_size // heads),
    )


def _with_dense_layers(model: MoEModel, moe_layer_ids: Iterable[int], dense_size: int) -> MoEModel:
    """The model with experts in these layers only."""
    layers = tuple(moe_layer_ids)
    if not layers:
        raise ModelError(f"none of the {model.num_layers} layers has experts: the model is dense; use one with experts")
    return replace(model, moe_layer_ids=layers, dense_size=dense_size if len(layers) < model.num_layers else None)


def _mixtral(keys: _Keys, name: str) -> MoEModel:
    return _model(keys, name, "num_local_experts", "intermediate_size", _grouped_query(keys))


def _olmoe(keys: _Keys, name: str) -> MoEModel:
    return _model(keys, name, "num_experts", "intermediate_size", _grouped_query(keys))


def _gpt_oss(keys: _Keys, name: str) -> MoEModel:
    """As mixtral, but that the heads together are wider than the hidden vector."""
    return _model(keys, name, "num_local_experts", "intermediate_size", _grouped_query(keys, keys.count("head_dim")))


def _qwen3_moe(keys: _Keys, name: str) -> MoEModel:
    """Experts in every `decoder_sparse_step`-th layer, counted from 1, but for `mlp_only_layers`."""
    # Newer versions of the family's code save the number of experts by another name.
    experts = "num_local_experts" if "num_local_experts" in keys.values else "num_experts"
    model = _model(keys, name, experts, "moe_intermediate_size", _grouped_query(keys))
    step = keys.count_or("decoder_sparse_step", 1)
    dense = keys.layers("mlp_only_layers", model.num_layers) or []
    moe = (layer for layer in model.moe_layer_ids if (layer + 1) % step == 0 and layer not in dense)
    return _with_dense_layers(model, moe, keys.count("intermediate_size"))


def _qwen2_moe(keys: _Keys, name: str) -> MoEModel:
    """As qwen3_moe with one shared expert, whose width is its own."""
    shared = SharedExperts(1, keys.count("shared_expert_intermediate_size"))
    return replace(_qwen3_moe(keys, name), shared_experts=shared)


def _deepseek(keys: _Keys, name: str) -> MoEModel:
    return _deepseek_layers(keys, name, _grouped_query(keys))


def _deepseek_v2(keys: _Keys, name: str) -> MoEModel:
    """Latent attention, and a token's experts from some of `n_group` groups unless the choice is called greedy."""
    model = _deepseek_layers(keys, name, _latent(keys))
    if keys.values.get("topk_method") == "greedy":
        return model
    groups = keys.count_or("n_group", 1, most=model.num_experts)
    return replace(model, expert_groups=groups, groups_per_token=keys.count_or("topk_group", 1, most=groups))


def _deepseek_layers(keys: _Keys, name: str, attention: Attention) -> MoEModel:
    """Dense layers first, then experts in every `moe_layer_freq`-th layer; shared experts as wide as routed ones."""
    model = _model(keys, name, "n_routed_experts", "moe_intermediate_size", attention)
    first, step = keys.count("first_k_dense_replace", least=0), keys.count_or("moe_layer_freq", 1)
    moe = (layer for layer in model.moe_layer_ids if layer >= first and layer % step == 0)
    model = _with_dense_layers(model, moe, keys.count("intermediate_size"))
    shared = keys.count_or_null("n_shared_experts", least=0)
    return replace(model, shared_experts=SharedExperts(shared, model.expert_size) if shared else None)


def _latent(keys: _Keys) -> LatentAttention:
    return LatentAttention(
        heads=keys.count("num_attention_heads"),
        q_rank=keys.count_or_null("q_lora_rank"),
        kv_rank=keys.count("kv_lora_rank"),
        nope_size=keys.count("qk_nope_head_dim"),
        rope_size=keys.count("qk_rope_head_dim"),
        value_size=keys.count("v_head_dim"),
    )


def _llama4(keys: _Keys, name: str) -> MoEModel:
    return _llama4_text(keys.section("text_config"), name)


def _llama4_text(keys: _Keys, name: str) -> MoEModel:
    """Experts in the layers of `moe_layers` or in every `interleave_moe_layer_step`-th; one shared expert as wide."""
    attention = _grouped_query(keys, keys.count("head_dim"))
    model = _model(keys, name, "num_local_experts", "intermediate_size", attention)
    step = keys.count_or("interleave_moe_layer_step", 1)
    listed = keys.layers("moe_layers", model.num_layers)
    moe = range(step - 1, model.num_layers, step) if listed is None else sorted(set(listed))
    model = _with_dense_layers(model, moe, keys.count("intermediate_size_mlp"))
    return replace(model, shared_experts=SharedExperts(1, model.expert_size))


def _dbrx(keys: _Keys, name: str) -> MoEModel:
    """Names of its own, in sections for attention and experts."""
    ffn, heads, hidden_size = keys.section("ffn_config"), keys.count("n_heads"), keys.count("d_model")
    num_experts, num_layers = ffn.experts("moe_num_experts"), keys.count("n_layers", most=MOST_LAYERS)
    kv_heads = keys.section("attn_config").count("kv_n_heads", most=heads)
    return MoEModel(
        name=name,
        hidden_size=hidden_size,
        expert_size=ffn.count("ffn_hidden_size"),
        num_experts=num_experts,
        top_k=ffn.count("moe_top_k", most=num_experts),
        moe_layer_ids=tuple(range(num_layers)),
        num_layers=num_layers,
        attention=GroupedQueryAttention(heads, kv_heads, hidden_size // heads),
        vocabulary_size=keys.count("vocab_size"),
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )


FAMILIES: dict[str, Callable[[_Keys, str], MoEModel]] = {
    "dbrx": _dbrx,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v2,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v2,
    "llama4": _llama4,
    "llama4_text": _llama4_text,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
