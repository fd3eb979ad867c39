"""Bytes of an element of a model's data, and what a config.json says of them: its data type and its quantisation."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

Number = Any  # a float, or an array where JAX traces it
UNQUANTISED = 2.0  # bfloat16 and float16, in which almost all models are published


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element: a weight with its share of scales, an element of a hidden vector, of a key or a value."""

    experts: Number = UNQUANTISED  # weights of routed experts
    dense: Number = UNQUANTISED  # weights of dense layers and shared experts
    attention: Number = UNQUANTISED  # weights of the attention
    activations: Number = UNQUANTISED  # hidden vectors, as nodes exchange them
    kv: Number = UNQUANTISED  # keys and values of the context


class QuantisationError(ValueError):
    """A quantisation whose bytes are not known. The message names the field and its value."""


DTYPES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}

# A module of each kind by the names that its path may have in an implementation, without the layer before it.
MODULES = {
    "experts": tuple(
        f"{block}.experts.0.up_proj" for block in ("mlp", "block_sparse_moe", "feed_forward", "moe", "ffn")
    ),
    "dense": ("mlp.up_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj", "feed_forward.up_proj"),
    "attention": ("self_attn.q_proj", "self_attn.o_proj", "attention.q_proj", "attn.q_proj"),
}


def bytes_of_dtype(dtype: object) -> float | None:
    """Bytes of a number of this type, such as `bfloat16` or `torch.float8_e4m3fn`; `None` where it is not known."""
    name = str(dtype).removeprefix("torch.")
    return 1.0 if name.startswith("float8") else DTYPES.get(name)


def quantised(unquantised: float, quantisation: Mapping[str, Any], layer: int) -> ElementBytes:
    """Bytes of a model whose weights are quantised as `quantization_config` says, in this layer.

    Hidden vectors keep the bytes of the model's data type, as they are quantised inside of a product only. Raises
    `QuantisationError` for a method that is not known.
    """
    widths = _widths(quantisation)
    ignored = [name for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
               for name in _names(quantisation.get(key))]  # fmt: skip

    def width(kind: str) -> float:
        paths = [f"model.layers.{layer}.{module}" for module in MODULES[kind]]
        if any(_matches(name, path) for name in ignored for path in paths):
            return unquantised
        meant = (weight for target, weight in widths if any(_matches(target, path) for path in paths))
        return next(meant, unquantised)

    return ElementBytes(
        experts=width("experts"),
        dense=width("dense"),
        attention=width("attention"),
        activations=unquantised,
        kv=_cache_bytes(quantisation, unquantised),
    )


def _weight_bytes(quantisation: Mapping[str, Any]) -> float:
    """Bytes of a weight with its share of scales. Those of blocks of 128 x 128 are 0.02 % and left out."""
    method = str(quantisation.get("quant_method")).lower()
    algorithm = str(quantisation.get("quant_algo", "")).upper()
    if method in ("fp8", "fbgemm_fp8") or algorithm == "FP8":
        return 1.0
    if method == "mxfp4" or algorithm == "MXFP4":
        return (4 + 8 / 32) / 8  # a scale of one byte for each 32 weights
    if algorithm == "NVFP4":
        return (4 + 8 / 16) / 8
    if method == "bitsandbytes" and (quantisation.get("load_in_4bit") or quantisation.get("load_in_8bit")):
        return (4 + 32 / 64) / 8 if quantisation.get("load_in_4bit") else 1.0
    bits = next((quantisation[key] for key in ("bits", "w_bit", "num_bits") if key in quantisation), None)
    if not _is_count(bits):
        raise QuantisationError(f"quantization_config.quant_method is {method!r}, whose bytes are not known")
    group = quantisation.get("group_size", quantisation.get("q_group_size"))
    return (bits + ((16 + bits) / group if _is_count(group) else 0)) / 8  # a scale and a zero point for each group


def _grouped_bytes(group: Mapping[str, Any]) -> float:
    """Bytes of a weight by a group of `compressed-tensors`."""
    weights = _mapping(group.get("weights"))
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if not _is_count(bits):
        raise QuantisationError("quantization_config.config_groups names no weights.num_bits")
    scale = 8 if weights.get("type") == "float" and bits == 4 else 16
    return (bits + (scale / size if _is_count(size) else 0)) / 8


def _widths(quantisation: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Patterns of the modules that are quantised, each with the bytes of their weights; the first that fits counts."""
    groups = [_mapping(group) for group in _mapping(quantisation.get("config_groups")).values()]
    if not groups or quantisation.get("quant_algo"):  # where a method is named, groups repeat it
        every = r"re:.*\.experts\." if str(quantisation.get("quant_method")).lower() == "mxfp4" else "re:.*"
        return [(every, _weight_bytes(quantisation))]
    listed = [(list(_names(group.get("targets"))), _grouped_bytes(group)) for group in groups]
    by_name = [(name, weight) for names, weight in listed for name in names if name != "Linear"]
    return by_name + [("re:.*", weight) for names, weight in listed if not names or "Linear" in names]


def _cache_bytes(quantisation: Mapping[str, Any], unquantised: float) -> float:
    bits = _mapping(quantisation.get("kv_cache_scheme")).get("num_bits")
    if _is_count(bits):
        return bits / 8
    return 1.0 if str(quantisation.get("kv_cache_quant_algo", "")).upper() == "FP8" else unquantised


def _matches(pattern: str, path: str) -> bool:
    """Whether a module is meant: `re:` begins a regular expression, else whole names of the path, or `*`, are."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], path) is not None
        except re.error as error:
            raise QuantisationError(f"quantization_config has {pattern!r}, no regular expression ({error})") from None
    names = re.escape(pattern.strip(".")).replace(r"\*", ".*")
    return bool(pattern.strip(".")) and re.search(rf"(^|\.){names}(\.|$)", path) is not None


def _names(value: object) -> Iterable[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
