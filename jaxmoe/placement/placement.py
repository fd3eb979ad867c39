"""A placement, which part of every expert each node holds and the exchange that it is run with; and its files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from jaxmoe.errors import PlanError
from jaxmoe.files import atomic_write
from jaxmoe.placement.copies import Copies, copies_of_arrays
from jaxmoe.placement.exchange import Exchange, ExchangeError, PriceTable, exchange_of, prices_of_arrays
from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.trace import TraceError
from jaxmoe.units import GIGA

Mode = Literal["sharded", "replicated"]  # of shares
PlanMode = Literal["sharded", "replicated", "copies"]
FORMAT = 2  # of plan files with copies or link prices; all others are of format 1, which the first ones did not state


@dataclass(frozen=True)
class Placement:
    """Shares of every expert on every node, float32 [layer, expert, node]; rows sum to 1.

    `sharded`: a node holds that fraction of the expert's weights, and a token visits every host.
    `replicated`: every host has the whole expert and serves that fraction of its tokens.
    `copies`: each choice is served by one of several copies of its expert, which are `copies`; see `of_copies`.
    `mesh_shape` is of machines that are meshes. `exchange` names that of every layer; empty where none is stated.
    `prices` are the table of the layers whose exchange goes by prices of links.
    """

    share: np.ndarray
    mesh_shape: tuple[int, int] | None
    mode: PlanMode
    layer_ids: tuple[int, ...]
    meta: dict[str, object] = field(default_factory=dict)
    exchange: tuple[str, ...] = ()
    copies: Copies | None = None
    prices: PriceTable | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(PlanMode):
            raise PlanError(f"mode is {self.mode!r}, expected 'sharded', 'replicated' or 'copies'")
        if (self.mode == "copies") != (self.copies is not None):
            raise PlanError(f"mode is {self.mode!r} with{'' if self.copies else 'out'} copies; make it with of_copies")
        if self.share.ndim != 3 or 0 in self.share.shape:
            raise PlanError(f"share has shape {self.share.shape}, expected non-empty [layer, expert, node]")
        if self.mesh_shape is not None:
            _check_mesh(self.mesh_shape, self.share.shape[2])
        if len(self.layer_ids) != self.share.shape[0]:
            raise PlanError(f"{len(self.layer_ids)} layer_ids for {self.share.shape[0]} layers of shares")
        _check_exchange(self.exchange, self.share.shape[0])
        if self.prices is not None and len(self.prices.price) != self.share.shape[0]:
            raise PlanError(f"exchange_price is of {len(self.prices.price)} layers, but share of {self.share.shape[0]}")
        if not np.isfinite(self.share).all() or (self.share < 0).any():
            raise PlanError("share holds negative or non-finite values; every share must be in [0, 1]")
        total = self.share.sum(axis=2)
        worst = np.unravel_index(np.abs(total - 1).argmax(), total.shape)
        if abs(total[worst] - 1) > 1e-4:
            raise PlanError(
                f"shares of expert {worst[1]} in layer {self.layer_ids[worst[0]]} sum to {total[worst]:.6g}, expected 1"
            )

    @classmethod
    def of_copies(
        cls,
        copies: Copies,
        mesh_shape: tuple[int, int] | None,
        layer_ids: tuple[int, ...],
        meta: dict[str, object] | None = None,
        exchange: tuple[str, ...] = (),
    ) -> "Placement":
        """A placement of copies; its share is what each node does of an expert on average, as far as its rule says."""
        return cls(copies.mean_share(), mesh_shape, "copies", layer_ids, meta or {}, exchange, copies)

    @property
    def computed(self) -> np.ndarray:
        """Shares of what choices name once copies are chosen: of copies where there are any, else of experts."""
        return self.share if self.copies is None else self.copies.share

    @property
    def computed_mode(self) -> Mode:
        """The mode of the shares that are `computed`; copies are sharded."""
        return "sharded" if self.mode == "copies" else self.mode

    def exchanges(self, name: str | None = None) -> tuple[Exchange | str, ...]:
        """The exchange of every layer, or that of a name for all of them, with the layer's table if it takes one."""
        names = self.exchange if name is None else (name,) * len(self.share)
        if self.prices is None:
            return names
        return tuple(self.prices.described(each, row) for row, each in enumerate(names))

    def of_layers(self, rows: Sequence[int]) -> "Placement":
        """The placement of these of its layers."""
        at = list(rows)
        return replace(
            self,
            share=self.share[at],
            layer_ids=tuple(self.layer_ids[row] for row in at),
            exchange=tuple(self.exchange[row] for row in at) if self.exchange else (),
            copies=None if self.copies is None else self.copies.rows(at),
            prices=None if self.prices is None else self.prices.rows(at),
        )

    def memory(self, expert_bytes: float) -> np.ndarray:
        """Bytes of expert weights on every node, all layers and copies together: float [node]."""
        if self.copies is not None:
            return self.copies.memory(expert_bytes)
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


# Plan files: `plan.npz` with share, mode, exchange, layer_ids, meta and format, of a mesh its mesh_shape, of exchanges
# that go by prices exchange_price and exchange_softness, and of copies copy_of, copy_share, serving and the arrays of
# the rule.


def write_plan(path: Path, placement: Placement) -> None:
    """Write a placement as `plan.npz`, with the arrays that it states.

    An older file of that name is replaced at once, or not at all.
    """
    arrays: dict[str, Any] = {
        "share": placement.share.astype(np.float32),
        "mode": np.asarray(placement.mode),
        "exchange": np.asarray(placement.exchange, np.str_),
        "layer_ids": np.asarray(placement.layer_ids),
        "meta": np.asarray(json.dumps(placement.meta)),
        "format": np.asarray(1 if placement.copies is None and placement.prices is None else FORMAT),
    }
    if placement.prices is not None:
        arrays |= placement.prices.arrays()
    if placement.copies is not None:
        arrays |= placement.copies.arrays()
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
    _check_format(arrays)
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
    mode = _mode(arrays)
    copies = copies_of_arrays(arrays) if mode == "copies" else None
    if copies is not None:
        known = copies.mean_share()
        if share.shape != known.shape or not np.abs(share - known).max() < 1e-3:
            raise PlanError("share is not what its copies do on average; write the plan again")
    return Placement(share, shape, mode, ids, _meta(arrays), _exchange(arrays), copies, prices_of_arrays(arrays))


def _check_format(arrays: dict[str, np.ndarray]) -> None:
    if "format" not in arrays:
        return
    _check_whole_numbers(arrays, "format", ())
    if not 1 <= arrays["format"] <= FORMAT:
        raise PlanError(f"has format {arrays['format']}, this version of jaxmoe reads up to {FORMAT}; use a newer one")


def _check_whole_numbers(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    array = arrays[name]
    if array.shape != shape or array.dtype.kind not in "iu":
        raise PlanError(f"{name} is {array.dtype} of shape {array.shape}, expected whole numbers of shape {shape}")


def _exchange(arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    names = arrays.get("exchange", np.empty(0, "<U1"))
    if names.ndim != 1 or names.dtype.kind != "U":
        raise PlanError(f"exchange is {names.dtype} of shape {names.shape}, expected a name for each layer")
    return tuple(names.tolist())


def _mode(arrays: dict[str, np.ndarray]) -> PlanMode:
    mode = str(arrays.get("mode", "sharded"))
    if mode not in get_args(PlanMode):
        raise PlanError(f"mode is {mode[:40]!r}, expected 'sharded', 'replicated' or 'copies'")
    return cast(PlanMode, mode)


def _meta(arrays: dict[str, np.ndarray]) -> dict[str, object]:
    text = str(arrays.get("meta", "{}"))
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"meta is not JSON ({error}); write the plan again") from None
    if not isinstance(meta, dict):
        raise PlanError(f"meta is {text[:40]!r}, expected a JSON object; write the plan again")
    return meta
