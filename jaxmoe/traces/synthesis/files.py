"""Files of processes: `process.npz`, the arrays of a `GatingProcess` under their own names."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.formats.aside import whole
from jaxmoe.traces.synthesis.process import GatingProcess, Preferences, Requests
from jaxmoe.traces.trace import TraceError

VERSION = 1
PREFERENCES = tuple(field.name for field in fields(Preferences))
SQUARE = ("from_layer", "from_token", "together")
NUMBERS = ("top_k", "expert_groups", "groups_per_token")
REQUIRED = {*PREFERENCES, *NUMBERS, "length", "request_topics", "window", "drift", "layer_ids", "facts"}


def write_process(path: Path, process: GatingProcess) -> None:
    """Write a process; an older file of that name is replaced at once, or not at all."""
    requests = process.requests
    arrays: dict[str, Any] = {
        "process_version": VERSION,
        **{name: np.asarray(getattr(process.preferences, name), np.float32) for name in PREFERENCES},
        "length": requests.length,
        "request_topics": requests.topics,
        "window": requests.window,
        "drift": float(requests.drift),
        "layer_ids": np.asarray(process.layer_ids),
        **{name: getattr(process, name) for name in NUMBERS},
        "facts": json.dumps(process.facts),
    }
    if requests.prompt is not None:
        arrays["prompt"] = requests.prompt
    with whole(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_process(path: Path) -> GatingProcess:
    """Read a process. Raises `TraceError` with the file's name for anything else."""
    if not path.exists():
        raise TraceError(f"{path}: no such file; check the path")
    try:
        return _process(read_arrays(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _process(arrays: dict[str, np.ndarray]) -> GatingProcess:
    missing = sorted(REQUIRED - arrays.keys())
    if missing:
        remedy = "fit a process to this trace" if "experts" in arrays else "write it again"
        raise TraceError(f"is no process, it has no {', '.join(missing)}; {remedy} with jaxmoe trace fit")
    version = arrays.get("process_version")
    if version is None or version.tolist() != VERSION:
        raise TraceError(f"is of version {version}, expected {VERSION}; fit the process again")
    _check(arrays)
    return GatingProcess(
        preferences=Preferences(**{name: jnp.asarray(np.asarray(arrays[name], np.float32)) for name in PREFERENCES}),
        requests=Requests(
            arrays["length"],
            arrays.get("prompt"),
            arrays["request_topics"],
            int(arrays["window"]),
            float(arrays["drift"]),
        ),
        layer_ids=tuple(arrays["layer_ids"].tolist()),
        facts=_facts(arrays["facts"]),
        **{name: int(arrays[name]) for name in NUMBERS},
    )


def _check(arrays: dict[str, np.ndarray]) -> None:
    """Raise `TraceError` for an array that has not the type and shape it should have."""
    size = arrays["popularity"].shape
    if len(size) != 2 or 0 in size:
        raise TraceError(f"popularity has shape {size}, expected non-empty [layer, expert]")
    floats = dict.fromkeys(PREFERENCES, size) | dict.fromkeys(SQUARE, (*size, size[1])) | {"drift": ()}
    floats |= {"topics": (*arrays["topics"].shape[:1], *size), "phases": (2, *size)}
    floats |= {"first_tokens": (max(1, *arrays["first_tokens"].shape[:1]), *size)}
    counts = dict.fromkeys((*NUMBERS, "window"), ()) | {"layer_ids": size[:1]}
    # Requests check how these fit together.
    counts |= {"length": (arrays["length"].size,), "request_topics": arrays["request_topics"].shape}
    if "prompt" in arrays:
        counts["prompt"] = arrays["prompt"].shape
    for kinds, kind, shapes in (("f", "finite numbers", floats), ("iu", "whole numbers", counts)):
        for name, shape in shapes.items():
            array = arrays[name]
            if array.shape != shape or array.dtype.kind not in kinds or not np.isfinite(array).all():
                raise TraceError(f"{name} is {array.dtype} of shape {array.shape}, expected {kind} of shape {shape}")


def _facts(text: np.ndarray) -> dict[str, str]:
    try:
        return {str(name): str(fact) for name, fact in dict(json.loads(str(text))).items()}
    except (ValueError, TypeError, RecursionError):
        raise TraceError(f"facts is {str(text)[:40]!r}, expected a JSON object") from None
