"""Plan files: `plan.npz` with share, mode, exchange, layer_ids and meta, and of a mesh its mesh_shape."""

import json
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from jaxmoe.placement.placement import Mode, Placement, PlanError
from jaxmoe.traces.formats.zipped import read_arrays
from jaxmoe.traces.trace import TraceError


def write_plan(path: Path, placement: Placement) -> None:
    """Write a placement; an older file of that name is replaced at once, or not at all."""
    arrays: dict[str, Any] = {
        "share": placement.share.astype(np.float32),
        "mode": np.asarray(placement.mode),
        "exchange": np.asarray(placement.exchange, np.str_),
        "layer_ids": np.asarray(placement.layer_ids),
        "meta": np.asarray(json.dumps(placement.meta)),
    }
    if placement.mesh_shape is not None:
        arrays["mesh_shape"] = np.asarray(placement.mesh_shape)
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            np.savez_compressed(file, **arrays)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_plan(path: Path, default_layer_ids: tuple[int, ...] = ()) -> Placement:
    """Read `plan.npz`, or an array file published with hd_moe, which is sharded and names no layers.

    Layers without ids get `default_layer_ids` if there are as many, else 0, 1, 2, ... Older plans state no exchange.
    Raises `PlanError` with the file's name for anything that is not a plan.
    """
    if not path.exists():
        raise PlanError(f"{path}: no such plan file; check the path")
    try:
        return _placement(read_arrays(path), default_layer_ids)
    except (TraceError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from None


def _placement(arrays: dict[str, np.ndarray], default_layer_ids: tuple[int, ...]) -> Placement:
    if "share" not in arrays:
        raise PlanError("has no share, expected the arrays of a plan.npz")
    share = arrays["share"]
    if share.ndim != 3 or share.dtype.kind not in "fiu":
        raise PlanError(f"share is {share.dtype} of shape {share.shape}, expected numbers [layer, expert, node]")
    shape = None
    if "mesh_shape" in arrays:
        _check_whole_numbers(arrays, "mesh_shape", (2,))
        shape = tuple(arrays["mesh_shape"].tolist())
    ids = default_layer_ids if len(default_layer_ids) == len(share) else tuple(range(len(share)))
    if "layer_ids" in arrays:
        _check_whole_numbers(arrays, "layer_ids", (arrays["layer_ids"].size,))
        ids = tuple(arrays["layer_ids"].tolist())
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        share = np.asarray(share, np.float32)
    return Placement(share, shape, _mode(arrays), ids, _meta(arrays), _exchange(arrays))


def _check_whole_numbers(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    array = arrays[name]
    if array.shape != shape or array.dtype.kind not in "iu":
        raise PlanError(f"{name} is {array.dtype} of shape {array.shape}, expected whole numbers of shape {shape}")


def _exchange(arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    names = arrays.get("exchange", np.empty(0, "<U1"))
    if names.ndim != 1 or names.dtype.kind != "U":
        raise PlanError(f"exchange is {names.dtype} of shape {names.shape}, expected a name for each layer")
    return tuple(names.tolist())


def _mode(arrays: dict[str, np.ndarray]) -> Mode:
    mode = str(arrays.get("mode", "sharded"))
    if mode not in get_args(Mode):
        raise PlanError(f"mode is {mode[:40]!r}, expected 'sharded' or 'replicated'")
    return cast(Mode, mode)


def _meta(arrays: dict[str, np.ndarray]) -> dict[str, object]:
    text = str(arrays.get("meta", "{}"))
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"meta is not JSON ({error}); write the plan again") from None
    if not isinstance(meta, dict):
        raise PlanError(f"meta is {text[:40]!r}, expected a JSON object; write the plan again")
    return meta
