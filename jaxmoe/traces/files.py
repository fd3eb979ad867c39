"""Trace files: the project's npz, and the JSON that hd_moe publishes. What a file is, its content says.

npz: `experts` int [token, layer, top_k] and 0-d `num_experts`; optional `layer_ids` int [layer],
`seq_start` int [sequence], `is_repeat` bool [token]; every other 0-d array is a fact about the source.
Gate weights, logits and sequence names are not part of a `GatingTrace` and are left in the file.

JSON (https://github.com/angerybob/HD-MoE): an object of layer number -> list over tokens of lists of
expert ids. It has neither sequences nor the number of experts.
"""

import json
import zlib
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from jaxmoe.traces.trace import GatingTrace, TraceError

ARRAYS = ("experts", "num_experts", "layer_ids", "seq_start", "is_repeat")
LEFT_IN_FILE = ("weights", "logits", "seq_name")
AGAIN = "the file is damaged or of another kind; get it again"


def read_trace(path: Path, num_experts: int | None = None) -> GatingTrace:
    """Read a trace file of either kind.

    `num_experts` is what the model has. It must agree with an npz, and is needed where that states none;
    JSON without it gets the largest id + 1. Raises `TraceError` with the file's name for anything else.
    """
    try:
        return _read(path, num_experts)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file; check the path") from None
    except OSError as error:
        raise TraceError(f"{path}: not readable ({error.strerror or error}); expected a trace file") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def write_trace(path: Path, trace: GatingTrace) -> None:
    """Write a trace as npz; an older file of that name is replaced at once, or not at all.

    Raises `TraceError` when a fact has the name of an array.
    """
    taken = trace.facts.keys() & {*ARRAYS, *LEFT_IN_FILE, "file", "allow_pickle"}  # the last two are numpy's
    if taken:
        raise TraceError(f"facts named {sorted(taken)} cannot be written; rename them")
    entries: dict[str, Any] = {name: getattr(trace, name) for name in ARRAYS} | trace.facts
    present: dict[str, Any] = {name: np.asarray(entry) for name, entry in entries.items() if entry is not None}
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            np.savez_compressed(file, **present)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _read(path: Path, num_experts: int | None) -> GatingTrace:
    with path.open("rb") as file:
        head = file.read(6)
    if not head:
        raise TraceError("the file is empty; get it again")
    if head.startswith(b"PK"):
        return _from_arrays(_read_npz(path), num_experts)
    if head == b"\x93NUMPY":
        raise TraceError("a single array (.npy); write an npz with the arrays experts and num_experts")
    return _from_layers(_read_json(path), num_experts, path.name)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz; pickled objects are refused by numpy, before anything of them runs."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files if name not in LEFT_IN_FILE}
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError) as error:
        raise TraceError(f"not a readable npz ({error}); {AGAIN}") from None


def _from_arrays(arrays: dict[str, np.ndarray], num_experts: int | None) -> GatingTrace:
    if "experts" not in arrays:
        remedy = "; load counts have no token order, use a trace" if "counts" in arrays else ""
        raise TraceError(f"has no array experts, only {sorted(arrays)}{remedy or '; use a trace file'}")
    experts = arrays["experts"]
    return GatingTrace(
        experts=experts,
        num_experts=_agreed(arrays.get("num_experts"), num_experts),
        layer_ids=arrays.get("layer_ids", np.arange(experts.shape[1] if experts.ndim > 1 else 0)),
        seq_start=arrays.get("seq_start", np.zeros(1, np.int64)),
        is_repeat=arrays.get("is_repeat"),
        facts={name: str(array) for name, array in arrays.items() if name not in ARRAYS and array.ndim == 0},
    )


def _agreed(stated: np.ndarray | None, num_experts: int | None) -> int:
    """The number of experts that file and caller agree on."""
    if stated is None:
        if num_experts is None:
            raise TraceError("does not state num_experts; add that array or name the model")
        return num_experts
    if stated.ndim != 0 or stated.dtype.kind not in "iu":
        raise TraceError(f"num_experts is {stated.dtype} of shape {stated.shape}, expected one whole number")
    if num_experts not in (None, int(stated)):
        raise TraceError(f"is of a model with {stated} experts, not {num_experts}; use a trace of the same model")
    return int(stated)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        layers = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"neither npz nor JSON ({error}); {AGAIN}") from None
    if not isinstance(layers, dict) or not layers:
        kind = "an empty object" if layers == {} else f"a {type(layers).__name__}"
        raise TraceError(f"JSON holds {kind}, expected an object of layer number -> list of tokens")
    return layers


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, which would keep only the last of equal keys."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"JSON has the key {twice!r} twice; keep one of them")
    return dict(pairs)


def _from_layers(layers: dict[str, Any], num_experts: int | None, source: str) -> GatingTrace:
    numbered = sorted((_layer_id(key), key) for key in layers)
    order = [layer for layer, _ in numbered]
    rows = [_layer_choices(layer, layers[key]) for layer, key in numbered]
    for layer, row in zip(order, rows, strict=True):
        if row.shape != rows[0].shape:
            shapes = "{} tokens with {} experts each".format
            raise TraceError(
                f"layer {layer} has {shapes(*row.shape)}, but layer {order[0]} has {shapes(*rows[0].shape)}; "
                "every layer needs the same tokens"
            )
    experts = np.stack(rows, axis=1)
    return GatingTrace(
        experts=experts,
        num_experts=int(experts.max(initial=0)) + 1 if num_experts is None else num_experts,
        layer_ids=np.asarray(order),
        seq_start=np.zeros(1, np.int64),
        is_repeat=None,
        facts={"source": source},
    )


def _layer_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise TraceError(f"JSON has the key {key!r}, expected only layer numbers")
    return int(key)


def _layer_choices(layer: int, tokens: Any) -> np.ndarray:
    """The choices of one layer, int64 [token, top_k]."""
    if not isinstance(tokens, list) or not tokens:
        raise TraceError(f"layer {layer} holds {str(tokens)[:40]}, expected a list of tokens")
    _name_misfit(layer, tokens, [type(chosen) is list for chosen in tokens], "a list of expert ids")
    top_k = len(tokens[0])
    _name_misfit(layer, tokens, [len(chosen) == top_k for chosen in tokens], f"{top_k} expert ids as in token 0")
    # One look at all types is fast; the search runs only when one of them is wrong.
    if set(map(type, chain.from_iterable(tokens))) - {int}:
        whole = [all(type(expert) is int for expert in chosen) for chosen in tokens]
        _name_misfit(layer, tokens, whole, "whole numbers")
    try:
        return np.asarray(tokens, np.int64)
    except OverflowError:
        raise TraceError(f"layer {layer} holds an expert id of more than 64 bits; {AGAIN}") from None


def _name_misfit(layer: int, tokens: list[Any], fits: list[bool], expected: str) -> None:
    """Raise `TraceError` for the first token that does not fit."""
    if not all(fits):
        token = fits.index(False)
        raise TraceError(f"layer {layer}, token {token} is {str(tokens[token])[:40]}, expected {expected}")
