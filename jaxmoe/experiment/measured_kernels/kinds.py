"""The kinds of measured tables: their columns, what tells kernels apart, and how a row becomes terms of its kernel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmoe.experiment.measured_kernels.token_counts import Routing, loads_of, slot_loads
from jaxmoe.experiment.measured_kernels.tuned_tiles import tiles_of
from jaxmoe.hardware.gpu import terms
from jaxmoe.hardware.gpu.deepep import copies_of
from jaxmoe.hardware.gpu.kernel import Terms
from jaxmoe.hardware.gpu.latent import DEEPSEEK_V3, latent_decode, latent_prefill, with_projections
from jaxmoe.hardware.gpu.sheet import ACTIVATION_BYTES, WEIGHT_BYTES, Sheet

Columns = Mapping[str, np.ndarray]
"""Columns of a table by name, [row]: numbers, or texts."""
MILLI = 1e-3


@dataclass(frozen=True)
class Kind:
    """One kind of table.

    `numbers` are columns of positive numbers that have to be there, `texts` of names; rows of one kernel agree in
    `kernel`. `shape` is what is held out as a whole, `size` grows with the work. `operations` are values of `op_name`
    that the kind takes, none where its columns alone tell it.
    """

    name: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    kernel: tuple[str, ...]
    shape: tuple[str, ...]
    size: str
    terms: Callable[[Columns, Sheet, Mapping[str, str]], Terms]
    operations: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()  # numbers that may be 0
    optional: tuple[str, ...] = ()  # texts that older tables leave out
    rising: bool = True  # whether a series is a run of sizes, of which every fourth is held out where it has one shape
    derived: tuple[tuple[str, Callable[[dict[str, np.ndarray]], np.ndarray]], ...] = ()  # columns made of the others
    refused: tuple[tuple[str, Callable[[Columns], np.ndarray]], ...] = ()  # what rows may not be, and which ones are
    every_shape: bool = False  # whether all shapes are held out in turn, where there are few
    latency: str = "latency"
    unit: float = MILLI
    needs: tuple[str, ...] = ()  # other columns that tell it apart

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that a table of this kind has."""
        return (*self.numbers, *self.texts, *self.needs)


def _gemm(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    precision = kernel["gemm_dtype"]
    height, width, inner = _floats(rows, "m", "n", "k")
    weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
    return terms.product(height, width, inner, sheet, precision, weight, activation)


# Models whose gate lets a token choose in half of the groups of experts, in kernels of a backend that runs it; and
# those whose other choices SGLang's collector gives to the first expert of the rank. By hidden and intermediate size,
# top-k and experts.
GROUPED = {(7168, 2048, 8, 256)}
CLAMPED = {(4096, 14336, 2, 8), (6144, 16384, 2, 8), (2816, 704, 8, 128), (2048, 1408, 4, 60), (8192, 5120, 1, 16)}
UNGATED = {(1856, 6, 128), (2688, 22, 512), (5120, 22, 512)}  # experts of two products: inter_size, topk, num_experts
DEEPEP = "deepepmoe"  # products of experts between DeepEP's exchanges


def _routing(shape: tuple[int, ...], kernel: Mapping[str, str]) -> Routing:
    backend, source = kernel["framework"], kernel["kernel_source"]
    if source == DEEPEP:  # choices come from the collector, not from a gate
        return "blocks" if kernel["op_name"] == "moe_context" else "free"
    if source.endswith("min_latency") or (shape in GROUPED and backend in ("sglang", "vllm")):
        return "grouped" if shape[3] % 8 == 0 else "free"
    return "clamped" if shape in CLAMPED and source == "sglang_fused_moe_triton" else "free"


def _moe(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    names = ("hidden_size", "inter_size", "topk", "num_experts")
    keys, of_row = grouped(rows, (*names, "num_tokens", "moe_ep_size", "distribution"))
    each = []
    for *numbers, distribution in keys:
        hidden, inner, top_k, experts, tokens, ranks = map(int, numbers)
        routing = _routing((hidden, inner, top_k, experts), kernel)
        each.append(loads_of(tokens, experts, top_k, ranks, distribution, routing))
    loads = terms.ExpertLoads(*(jnp.asarray(np.stack(part)[of_row], jnp.float32) for part in zip(*each, strict=True)))
    precision = kernel["moe_dtype"]
    height, width, chosen, count, cut, parts = _floats(rows, *names, "moe_tp_size", "moe_ep_size")
    plain = np.array([tuple(map(int, key[1:4])) in UNGATED for key in keys])[of_row]
    gemms = jnp.asarray(np.where(plain | ("nongated" in kernel["kernel_source"]), 2.0, 3.0), jnp.float32)
    weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
    return terms.fused_moe(
        loads, height, width / cut, count / parts, chosen, gemms, sheet, precision, weight, activation
    )


def _prefill(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    batch, tokens, heads, kv_heads, size, window = _floats(
        rows, "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window_size"
    )
    cache = WEIGHT_BYTES[kernel["kv_cache_dtype"]]
    shared = terms.Heads(heads, kv_heads, size, size, window)
    return terms.prefill(batch, tokens, shared, sheet, kernel["attn_dtype"], cache)


def _decode(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    batch, step, heads, kv_heads, size, window = _floats(
        rows, "batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size"
    )
    cache = WEIGHT_BYTES[kernel["kv_cache_dtype"]]
    shared = terms.Heads(heads, kv_heads, size, size, window)
    return terms.decode(batch, step + 1, shared, sheet, kernel["attn_dtype"], cache)


def _mla_prefill(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    batch, tokens, heads = _floats(rows, "batch_size", "isl", "num_heads")
    cache = WEIGHT_BYTES[kernel["kv_cache_dtype"]]
    found = latent_prefill(batch, tokens, heads, DEEPSEEK_V3, sheet, cache)
    return _joined(found, kernel, sheet, batch * tokens, heads)


def _mla_decode(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    batch, step, heads = _floats(rows, "batch_size", "step", "num_heads")
    if kernel["op_name"] == "mla_generation" and "gemm_type" in rows:
        step = _floats(rows, "isl")[0]  # these tables state the cached tokens there
    cache = WEIGHT_BYTES[kernel["kv_cache_dtype"]]
    found = latent_decode(batch, step + 1, heads, DEEPSEEK_V3, sheet, cache)
    return _joined(found, kernel, sheet, batch, heads)


def _joined(found: Terms, kernel: Mapping[str, str], sheet: Sheet, tokens: jnp.ndarray, heads: jnp.ndarray) -> Terms:
    """Terms of attention with those of the projections around it, where a row times the whole module."""
    if "gemm_type" not in kernel:
        return found
    return with_projections(found, tokens, heads, DEEPSEEK_V3, sheet, kernel["gemm_type"])


def _moe_in_slots(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    names = ("num_tokens", "num_experts", "topk", "moe_ep_size", "num_slots")
    drawn = zip(*(rows[name].astype(int).tolist() for name in names), rows["distribution"].tolist(), strict=True)
    each = [slot_loads(*key) for key in drawn]
    loads = terms.ExpertLoads(*(jnp.asarray(np.stack(part), jnp.float32) for part in zip(*each, strict=True)))
    precision = kernel["moe_dtype"]
    hidden, inner, top_k, slots, cut, ranks = _floats(
        rows, "hidden_size", "inter_size", "topk", "num_slots", "moe_tp_size", "moe_ep_size"
    )
    weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
    return terms.fused_moe(loads, hidden, inner / cut, slots / ranks, top_k, 3.0, sheet, precision, weight, activation)


def _collective(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    message, ranks = _floats(rows, "message_size", "num_gpus")
    width = WEIGHT_BYTES[kernel.get("nccl_dtype") or kernel["allreduce_dtype"]]
    return terms.collective(kernel["op_name"], message * width, ranks, sheet)


def _all_to_all(rows: Columns, sheet: Sheet, kernel: Mapping[str, str]) -> Terms:
    """Tokens are those of a rank. Balanced choices of a token are on as many ranks as can be."""
    tokens, hidden, top_k, ranks = _floats(rows, "num_tokens", "hidden_size", "topk", "moe_ep_size")
    layers = zip(*(rows[name].astype(int).tolist() for name in ("moe_ep_size", "num_experts", "topk")), strict=True)
    drawn = jnp.asarray([copies_of(*layer) for layer in layers], jnp.float32)
    copies = jnp.where(rows["distribution"] == "balanced", jnp.minimum(ranks, top_k), drawn)
    return terms.all_to_all(kernel["op_name"], kernel["moe_dtype"], tokens, hidden, top_k, copies, ranks, sheet)


def grouped(columns: Columns, names: Sequence[str]) -> tuple[list[tuple[Any, ...]], Int[np.ndarray, " row"]]:
    """Values of each group in the order of `names`, sorted, and the group of every row."""
    parts = [np.unique(columns[name], return_inverse=True) for name in names]
    code = np.zeros(len(columns[names[0]]), np.int64)
    for values, at in parts:
        code = code * len(values) + at.ravel()
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    return [tuple(columns[name][row].item() for name in names) for row in first], group.ravel()


def _floats(rows: Columns, *names: str) -> list[jnp.ndarray]:
    return [jnp.asarray(rows[name], jnp.float32) for name in names]


_ATTENTION = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step", "window_size")
_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "window_size")
_MLA = ("num_heads", "batch_size", "isl", "step")
_OF = ("framework", "op_name", "kernel_source")
_NO_LAYER: tuple[tuple[str, Callable[[Columns], np.ndarray]], ...] = (
    ("topk is above num_experts", lambda rows: rows["topk"] > rows["num_experts"]),
    ("num_experts is no multiple of moe_ep_size", lambda rows: rows["num_experts"] % rows["moe_ep_size"] != 0),
)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("gemm", ("m", "n", "k"), ("gemm_dtype", *_OF), ("gemm_dtype", *_OF), ("n", "k"), "m", _gemm, ("gemm",)),
        Kind(
            "moe",
            ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
            ("distribution", "moe_dtype", *_OF),
            ("moe_dtype", "tiles", *_OF),
            ("hidden_size", "inter_size", "topk", "num_experts"),
            "num_tokens",
            _moe,
            ("moe", "moe_context", "moe_generation", "wideep_moe", "wideep_moe_eplb"),
            every_shape=True,
            derived=(("tiles", tiles_of),),
            refused=_NO_LAYER,
        ),
        Kind(
            "attention_context",
            _ATTENTION,
            ("attn_dtype", "kv_cache_dtype", *_OF),
            ("attn_dtype", "kv_cache_dtype", *_OF),
            _HEADS,
            "isl",
            _prefill,
            ("context_attention",),
            ("step", "window_size"),
        ),
        Kind(
            "attention_generation",
            _ATTENTION,
            ("attn_dtype", "kv_cache_dtype", *_OF),
            ("attn_dtype", "kv_cache_dtype", *_OF),
            _HEADS,
            "step",
            _decode,
            ("generation_attention",),
            ("step", "window_size"),
        ),
        Kind(
            "mla_context_module",
            _MLA,
            ("gemm_type", "kv_cache_dtype", *_OF),
            ("gemm_type", "kv_cache_dtype", *_OF),
            ("num_heads", "batch_size"),
            "isl",
            _mla_prefill,
            ("mla_context_module", "mla_context"),
            ("step",),
        ),
        Kind(
            "mla_generation_module",
            _MLA,
            ("gemm_type", "kv_cache_dtype", *_OF),
            ("gemm_type", "kv_cache_dtype", *_OF),
            ("num_heads", "batch_size"),
            "step",
            _mla_decode,
            ("mla_generation_module", "mla_generation"),
            ("step",),
        ),
        Kind(
            "mla_context",
            _MLA,
            ("kv_cache_dtype", *_OF),
            ("kv_cache_dtype", *_OF),
            ("num_heads", "batch_size"),
            "isl",
            _mla_prefill,
            ("mla_context",),
            ("step",),
        ),
        Kind(
            "mla_generation",
            _MLA,
            ("kv_cache_dtype", *_OF),
            ("kv_cache_dtype", *_OF),
            ("num_heads", "batch_size"),
            "step",
            _mla_decode,
            ("mla_generation",),
            ("step",),
        ),
        Kind(
            "wideep_moe",
            (
                *("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "num_slots"),
                *("moe_tp_size", "moe_ep_size"),
            ),
            ("distribution", "moe_dtype", *_OF),
            ("moe_dtype", "framework", "kernel_source"),
            ("hidden_size", "inter_size", "topk", "num_experts"),
            "num_tokens",
            _moe_in_slots,
            ("wideep_moe", "wideep_moe_eplb"),
            every_shape=True,
        ),
        Kind(
            "nccl",
            ("message_size", "num_gpus"),
            ("nccl_dtype", "op_name", "kernel_source"),
            ("nccl_dtype", "framework", "version", "op_name", "kernel_source"),
            ("message_size",),
            "message_size",
            _collective,
            tuple(terms.PASSED),
            optional=("framework", "version"),
        ),
        Kind(
            "all_reduce",
            ("message_size", "num_gpus"),
            ("allreduce_dtype", *_OF),
            ("allreduce_dtype", "version", *_OF),
            ("message_size",),
            "message_size",
            _collective,
            ("all_reduce",),
            optional=("version",),
        ),
        Kind(
            "alltoall",
            ("num_tokens", "hidden_size", "topk", "num_experts", "moe_ep_size"),
            ("distribution", "moe_dtype", *_OF),
            ("moe_dtype", *_OF),
            ("moe_ep_size",),
            "num_tokens",
            _all_to_all,
            terms.ALL_TO_ALL,
            refused=_NO_LAYER,
            every_shape=True,
        ),
    )
}
