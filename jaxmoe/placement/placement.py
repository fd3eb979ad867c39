"""A placement, which part of every expert each node holds and the exchange that it is run with; and its files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.files import atomic_write
from jaxmoe.placement.exchange import ExchangeError, exchange_of
from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.trace import TraceError
from jaxmoe.units import GIGA

Mode = Literal["sharded", "replicated"]


class PlanError(InputError):
    """A placement that cannot be used, with the reason and the remedy."""


@dataclass(frozen=True)
class Placement:
    """Shares of every expert on every node, float32 [layer, expert, node]; rows sum to 1.

    `sharded`: a node holds that fraction of the expert's weights, and a token visits every host.
    `replicated`: every host has the whole expert and serves that fraction of its tokens.
    `mesh_shape` is of machines that are meshes. `exchange` names that of every layer; empty where none is stated.
    """

    share: np.ndarray
    mesh_shape: tuple[int, int] | None
    mode: Mode
    layer_ids: tuple[int, ...]
    meta: dict[str, object] = field(default_factory=dict)
    exchange: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("sharded", "replicated"):
            raise PlanError(f"mode is {self.mode!r}, expected 'sharded' or 'replicated'")
        if self.share.ndim != 3 or 0 in self.share.shape:
            raise PlanError(f"share has shape {self.share.shape}, expected non-empty [layer, expert, node]")
        if self.mesh_shape is not None:
            _check_mesh(self.mesh_shape, self.share.shape[2])
        if len(self.layer_ids) != self.share.shape[0]:
            raise PlanError(f"{len(self.layer_ids)} layer_ids for {self.share.shape[0]} layers of shares")
        _check_exchange(self.exchange, self.share.shape[0])
        if not np.isfinite(self.share).all() or (self.share < 0).any():
            raise PlanError("share holds negative or non-finite values; every share must be in [0, 1]")
        total = self.share.sum(axis=2)
        worst = np.unravel_index(np.abs(total - 1).argmax(), total.shape)
        if abs(total[worst] - 1) > 1e-4:
            raise PlanError(
                f"shares of expert {worst[1]} in layer {self.layer_ids[worst[0]]} sum to {total[worst]:.6g}, expected 1"
            )

    def memory(self, expert_bytes: float) -> np.ndarray:
        """Bytes of expert weights on every node, all layers together: float [node]."""
        held = self.share if self.mode == "sharded" else self.share > 0
        return held.sum(axis=(0, 1)) * expert_bytes


def _check_mesh(mesh_shape: tuple[int, int], nodes: int) -> None:
    if min(mesh_shape) < 1:
        raise PlanError(f"mesh_shape is {list(mesh_shape)}, expected two positive numbers")
    if nodes != mesh_shape[0] * mesh_shape[1]:
        has = mesh_shape[0] * mesh_shape[1]
        raise PlanError(f"share is for {nodes} nodes but mesh_shape {list(mesh_shape)} has {has}")


def _check_exchange(names: tuple[str, ...], layers: int) -> None:
    if names and len(names) != layers:
        raise PlanError(f"{len(names)} names of exchanges for {layers} layers of shares; name one for each layer")
    for name in names:
        try:
            exchange_of(name)
        except ExchangeError as error:
            raise PlanError(str(error)) from None


def check_fits(placement: Placement, expert_bytes: float, capacity: np.ndarray | None) -> None:
    """Raise `PlanError` when a node needs more than its `capacity`, B [node]; `None` is no limit."""
    if capacity is None:
        return
    memory = placement.memory(expert_bytes)
    # Shares are float32: a plan that fills a node to the brim may exceed it by rounding.
    overshoot = memory - (1 + 1e-4) * capacity
    worst = int(overshoot.argmax())
    if overshoot[worst] > 0:
        raise PlanError(
            f"node {worst} needs {memory[worst] / GIGA:.4g} GB for its experts "
            f"but has {capacity[worst] / GIGA:.4g} GB; spread the plan or raise the memory capacity"
        )


# Plan files: `plan.npz` with share, mode, exchange, layer_ids and meta, and of a mesh its mesh_shape.


def write_plan(path: Path, placement: Placement) -> None:
    """Write a placement as `plan.npz`: share, mode, exchange, layer_ids, meta, and of a mesh its mesh_shape.

    An older file of that name is replaced at once, or not at all.
    """
    arrays: dict[str, Any] = {
        "share": placement.share.astype(np.float32),
        "mode": np.asarray(placement.mode),
        "exchange": np.asarray(placement.exchange, np.str_),
        "layer_ids": np.asarray(placement.layer_ids),
        "meta": np.asarray(json.dumps(placement.meta)),
    }
    if placement.mesh_shape is not None:
        arrays["mesh_shape"] = np.asarray(placement.mesh_shape)
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **arrays)


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
