"""Plan files: `plan.npz` with share, mode, exchange, layer_ids and meta, and of a mesh its mesh_shape."""

import json
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from jaxmoe.placement.placement import Placement, PlanError


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
    data = _read_arrays(path)
    if "share" not in data:
        raise PlanError(f"{path}: has no share, expected the arrays of a plan.npz")
    try:
        layers = len(data["share"])
        ids = data.get("layer_ids", default_layer_ids if len(default_layer_ids) == layers else range(layers))
        meta = json.loads(str(data["meta"])) if "meta" in data else {}
        return Placement(
            share=np.asarray(data["share"], np.float32),
            mesh_shape=(int(data["mesh_shape"][0]), int(data["mesh_shape"][1])) if "mesh_shape" in data else None,
            mode=str(data.get("mode", "sharded")),  # type: ignore[arg-type]  # checked by Placement
            layer_ids=tuple(int(layer) for layer in ids),
            meta=meta,
            exchange=tuple(str(name) for name in data.get("exchange", ())),
        )
    except (PlanError, ValueError, IndexError, TypeError) as error:
        raise PlanError(f"{path}: {error}") from None


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan file") from None
    # What a damaged archive raises depends on where it is damaged; a lone .npy has no `files`.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, AttributeError, TypeError) as error:
        raise PlanError(f"{path}: not a readable npz file ({error})") from None
