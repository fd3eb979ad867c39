"""Formats of serving engines' placement files: what is read, what is written, and checks that the engines leave out.

- `eplb`: arrays of DeepSeek's EPLB in an npz, `phy2log` [layer, slot], `log2phy` [layer, expert, copy] padded with -1,
  `logcnt` [layer, expert]. https://github.com/deepseek-ai/EPLB
- `sglang`: the JSON of `--init-expert-location`, an object with exactly the key `physical_to_logical_map`. It has a row
  for every layer of the model, dense ones too, whose rows nobody uses.
- `vllm_ascend`: the JSON of `expert_map_path`. Its reader goes by the order of layers and devices, whatever ids they
  have, and breaks where a device has an expert twice.
- `tensorrt_llm`: the YAML of `moe_load_balancer`, with model layers as keys.
- `vllm`: lists as vLLM's open proposal of a file has them (pull request 49572): no release reads it yet.
- `plan`: jaxmoe's own `plan.npz`.

Files but `plan` and `vllm_ascend` state no ranks, and none the number of experts; what a model has is given as `Hints`.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.slots import SlotPlan, Slots
from jaxmoe.traces.formats.source import Hints, shown

MOST_IDS = 2**24  # numbers in a file: more are no placement


@dataclass(frozen=True)
class FilePlacement:
    """A placement as its file states it: the expert of every slot, with ranks and model layers where they are stated.

    `ranks` and `layer_ids` are `None` where the file does not state them. `notes` are remarks for the user.
    """

    slots: Slots
    ranks: int | None = None
    layer_ids: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineFormat:
    """Placement file format of a serving engine: how to recognise, read and write it; an entry of `registry.ENGINES`.

    `is_it` and `read` take the parsed content: the value in a JSON or YAML file, or the arrays of an npz by name.
    A format is written as `text` or as `arrays`; one with neither can only be read.
    """

    suffix: str
    is_it: Callable[[Any], bool]
    read: Callable[[Any, Hints, int | None], FilePlacement]
    text: Callable[[SlotPlan], str] | None = None
    arrays: Callable[[SlotPlan], dict[str, np.ndarray]] | None = None
    states_ranks: bool = False
    by_position: bool = False  # layers with experts are counted from 0
    note: str = ""  # to know of every file
    flags: Callable[[SlotPlan, Path], str] | None = None  # of the engine that loads it


# Numbers in files.


def _rows(value: object, what: str) -> Slots:
    """Lists of equally many whole numbers."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        raise PlanError(f"{what} is {shown(value)}, expected a list of slots for every layer")
    lengths = {len(row) for row in value}
    if len(lengths) > 1 or not max(lengths):
        raise PlanError(f"{what} has layers of {min(lengths)} to {max(lengths)} slots; every layer needs as many")
    if len(value) * max(lengths) > MOST_IDS:
        raise PlanError(f"{what} has {len(value)} x {max(lengths)} numbers, more than any placement")
    for row, slots in enumerate(value):
        for expert in slots:
            if type(expert) is not int or not -(2**31) <= expert < 2**31:
                raise PlanError(f"row {row} of {what} has {shown(expert)}, expected the number of an expert")
    return np.array(value, np.int64)


def _integer(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise PlanError(f"{what} is {shown(value)}, expected a whole number")
    return value


# EPLB.


def _read_eplb(arrays: dict[str, np.ndarray], hints: Hints, ranks: int | None) -> FilePlacement:
    slots = arrays["phy2log"]
    if slots.ndim != 2 or slots.dtype.kind not in "iu" or not slots.size:
        raise PlanError(f"phy2log is {slots.dtype} of shape {slots.shape}, expected experts [layer, slot]")
    slots = slots.astype(np.int64)
    experts = arrays["logcnt"].shape[-1] if "logcnt" in arrays else int(slots.max(initial=0)) + 1
    if "logcnt" in arrays:
        counted = [np.bincount(np.clip(row, 0, None), minlength=experts) for row in slots]
        if arrays["logcnt"].shape != (len(slots), experts) or not np.array_equal(counted, arrays["logcnt"]):
            raise PlanError("logcnt does not count the experts of phy2log; write the file again")
    if "log2phy" in arrays and not np.array_equal(_sorted(arrays["log2phy"]), _sorted(_log2phy(slots, experts))):
        raise PlanError("log2phy does not name the slots of phy2log; write the file again")
    return FilePlacement(slots)


def _sorted(log2phy: np.ndarray) -> np.ndarray:
    """The slots of every expert in order; which copy is the first does not matter."""
    return np.sort(log2phy, axis=-1)


def _log2phy(slots: Slots, experts: int) -> np.ndarray:
    """The slots of every expert, padded with -1: int [layer, expert, copy]."""
    counts = np.array([np.bincount(row, minlength=experts) for row in slots])
    table = np.full((*counts.shape, counts.max()), -1)
    for row, held in enumerate(slots):
        order = np.argsort(held, kind="stable")
        first = np.repeat(np.cumsum(counts[row]) - counts[row], counts[row])
        table[row, held[order], np.arange(len(held)) - first] = order
    return table


def eplb_arrays(plan: SlotPlan) -> dict[str, np.ndarray]:
    """`phy2log`, `log2phy` and `logcnt`, int64."""
    counts = plan.copies.sum(axis=2)
    return {"phy2log": plan.slots, "log2phy": _log2phy(plan.slots, plan.num_experts), "logcnt": counts}


# SGLang.

SGLANG = "physical_to_logical_map"


def _read_sglang(content: dict[str, Any], hints: Hints, ranks: int | None) -> FilePlacement:
    further = [key for key in content if key != SGLANG]
    if further:
        raise PlanError(f"has the key {shown(further[0])} beside {SGLANG}, with which SGLang stops; remove it")
    rows = _rows(content[SGLANG], SGLANG)
    if hints.layer_ids is None:
        note = "no model was given, so every row is taken for a layer with experts; rows of dense layers are among them"
        return FilePlacement(rows, notes=(note,))
    if hints.num_layers is not None and len(rows) != hints.num_layers:
        raise PlanError(
            f"has {len(rows)} rows, but the model {hints.num_layers} layers; SGLang counts dense layers, and gives "
            "layers beyond the last row the placement of the start"
        )
    return FilePlacement(rows[list(hints.layer_ids)], layer_ids=hints.layer_ids)


def _sglang(plan: SlotPlan) -> str:
    if plan.num_layers is None:
        raise PlanError("sglang has a row for every layer of the model, dense ones too; give --model")
    trivial = (np.arange(plan.slots.shape[1]) % plan.num_experts).tolist()
    own = dict(zip(plan.layer_ids, plan.slots.tolist(), strict=True))
    return json.dumps({SGLANG: [own.get(layer, trivial) for layer in range(plan.num_layers)]}) + "\n"


def _sglang_flags(plan: SlotPlan, path: Path) -> str:
    redundant = plan.slots.shape[1] - plan.num_experts
    more = f" --ep-num-redundant-experts {redundant}" if redundant else ""
    return f"--ep-size {plan.ranks}{more} --init-expert-location {shlex.quote(str(path))}"


# vLLM's list, and the map of vllm-ascend.


def _read_vllm(content: list[Any], hints: Hints, ranks: int | None) -> FilePlacement:
    if content and all(type(expert) is int for expert in content):
        rows = _rows([content], "the list")
        return FilePlacement(np.repeat(rows, 1 if hints.layer_ids is None else len(hints.layer_ids), axis=0))
    return FilePlacement(_rows(content, "the list"))


def _read_ascend(content: dict[str, Any], hints: Hints, ranks: int | None) -> FilePlacement:
    layers = content["layer_list"]
    if not isinstance(layers, list) or not layers:
        raise PlanError(f"layer_list is {shown(layers)}, expected a list of layers")
    if content.get("moe_layer_count") != len(layers):
        count = shown(content.get("moe_layer_count"))
        raise PlanError(f"moe_layer_count is {count} for {len(layers)} layers in layer_list; write their number")
    devices = [_devices(layer, position) for position, layer in enumerate(layers)]
    if len({len(some) for some in devices}) > 1:
        raise PlanError("layers have different numbers of devices; every layer needs as many")
    slots = [_rows(some, f"device_list of layer {position}") for position, some in enumerate(devices)]
    if len({each.shape for each in slots}) > 1:
        raise PlanError("layers have different numbers of slots; every layer needs as many")
    ids = [layer.get("layer_id") for layer in layers]
    notes = () if ids == [*range(len(ids))] else ("layer_id is not the position, but the engine goes by position",)
    return FilePlacement(np.stack([each.ravel() for each in slots]), ranks=len(devices[0]), notes=notes)


def _devices(layer: object, position: int) -> list[Any]:
    """Experts of all devices of a layer."""
    devices = layer.get("device_list") if isinstance(layer, dict) else None
    if not isinstance(devices, list) or not devices:
        raise PlanError(f"layer {position} of layer_list has no device_list")
    for rank, device in enumerate(devices):
        if not isinstance(device, dict) or "device_expert" not in device:
            raise PlanError(f"device {rank} of layer {position} has no device_expert")
    return [device["device_expert"] for device in devices]


def _ascend(plan: SlotPlan) -> str:
    if plan.repeated.any():
        row, expert, rank = np.argwhere(plan.repeated)[0]
        raise PlanError(
            f"rank {rank} has expert {expert} of layer {plan.layer_ids[row]} twice, which vllm-ascend cannot hold; "
            "use a plan without"
        )
    placed = plan.slots.reshape(len(plan.slots), plan.ranks, -1).tolist()
    layers = [
        {
            "layer_id": position,
            "device_count": plan.ranks,
            "device_list": [{"device_id": rank, "device_expert": held} for rank, held in enumerate(devices)],
        }
        for position, devices in enumerate(placed)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


# TensorRT-LLM.

TENSORRT_KEYS = {"initial_global_assignments", "num_slots", "layer_updates_per_iter"}


def _read_tensorrt(content: dict[str, Any], hints: Hints, ranks: int | None) -> FilePlacement:
    further = [key for key in content if key not in TENSORRT_KEYS]
    if further:
        raise PlanError(f"has the key {shown(further[0])}, which TensorRT-LLM refuses; remove it")
    count = _integer(content["num_slots"], "num_slots")
    updates = _integer(content.get("layer_updates_per_iter", 0), "layer_updates_per_iter")
    notes = (f"the engine re-places {updates} layers in every iteration",) if updates else ()
    placed = content.get("initial_global_assignments")
    if placed is None:
        return _tensorrt_start(count, hints, ranks, notes)
    if not isinstance(placed, dict) or not placed or not all(type(layer) is int for layer in placed):
        raise PlanError(f"initial_global_assignments is {shown(placed)}, expected slots by the number of a layer")
    layers = tuple(sorted(placed))
    slots = _rows([placed[layer] for layer in layers], "initial_global_assignments")
    if slots.shape[1] != count:
        raise PlanError(f"layers have {slots.shape[1]} slots, num_slots is {count}; make them equal")
    if hints.layer_ids is not None and layers != hints.layer_ids:
        missing = sorted({*hints.layer_ids} ^ {*layers})
        raise PlanError(f"layer {missing[0]} is in the file or in the model alone; keys are layers with experts")
    return FilePlacement(slots, layer_ids=layers, notes=notes)


def _tensorrt_start(count: int, hints: Hints, ranks: int | None, notes: tuple[str, ...]) -> FilePlacement:
    """The initial placement of TensorRT-LLM where the file assigns no experts: rank r of D holds experts from r E // D.

    Every layer has the same row of slots. Raises `PlanError` where the experts, layers or ranks are not known, or the
    slots cannot be split evenly over the ranks.
    """
    if ranks is None or hints.num_experts is None or hints.layer_ids is None:
        raise PlanError("states no assignments, so they depend on model and ranks; give --model and --ranks")
    if count > MOST_IDS or ranks < 1 or count % ranks:
        raise PlanError(f"num_slots is {count}, expected a multiple of {ranks} ranks")
    rank, own = np.divmod(np.arange(count), count // ranks)
    row = (rank * hints.num_experts // ranks + own) % hints.num_experts
    note = "states no assignments: these are the engine's own at the start"
    return FilePlacement(np.tile(row, (len(hints.layer_ids), 1)), layer_ids=hints.layer_ids, notes=(*notes, note))


def _tensorrt(plan: SlotPlan) -> str:
    rows = [f"  {layer}: {held}" for layer, held in zip(plan.layer_ids, plan.slots.tolist(), strict=True)]
    head = ["initial_global_assignments:", *rows, f"num_slots: {plan.slots.shape[1]}", "layer_updates_per_iter: 0"]
    return "\n".join(head) + "\n"


# All formats.


def _has(key: str) -> Callable[[Any], bool]:
    return lambda content: isinstance(content, dict) and key in content


NOT_READ_YET = "vLLM reads no placement yet: this is the list of an open proposal"

EPLB_FILE = EngineFormat(".npz", _has("phy2log"), _read_eplb, arrays=eplb_arrays, by_position=True)
SGLANG_FILE = EngineFormat(".json", _has(SGLANG), _read_sglang, _sglang, flags=_sglang_flags)
VLLM_ASCEND_FILE = EngineFormat(".json", _has("layer_list"), _read_ascend, _ascend, states_ranks=True, by_position=True)
TENSORRT_LLM_FILE = EngineFormat(".yaml", _has("num_slots"), _read_tensorrt, _tensorrt)
VLLM_FILE = EngineFormat(
    ".json",
    lambda content: isinstance(content, list),
    _read_vllm,
    lambda plan: json.dumps(plan.slots.tolist()) + "\n",
    by_position=True,
    note=NOT_READ_YET,
)
