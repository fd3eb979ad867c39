"""Placement files of any serving engine: format detected from the content, read, and written atomically."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxmoe.files import atomic_write
from jaxmoe.placement.engine_formats import EngineFormat, FilePlacement
from jaxmoe.placement.placement import PlanError, read_plan, write_plan
from jaxmoe.placement.slots import SlotPlan, slot_plan
from jaxmoe.registry import ENGINES
from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.formats.source import Hints, parse_json, shown
from jaxmoe.traces.trace import TraceError

OWN = "plan"  # the name of jaxmoe's own format


def formats() -> tuple[str, ...]:
    """The names of all formats."""
    return (*ENGINES, OWN)


@dataclass(frozen=True)
class ReadPlan:
    """A placement file after reading: the name of its format, its plan, and remarks for the user."""

    format: str
    plan: SlotPlan
    notes: list[str]


def read_slot_plan(path: Path, hints: Hints, ranks: int | None = None) -> ReadPlan:
    """Read a placement file of any format. `ranks` is how many share its slots, where the file does not say.

    Of an npz with several placements of EPLB, `phy2log_NAME` each, `FILE:NAME` is one. Raises `PlanError` with the
    file's name for anything that no engine should load.
    """
    try:
        content = _content(path)
        if content == {}:
            raise PlanError("holds nothing; get it again")
        if isinstance(content, dict) and "share" in content:
            plan, notes = slot_plan(read_plan(path, hints.layer_ids or ()))
            _check_ranks(plan.ranks, ranks)
            return ReadPlan(OWN, plan, notes)
        for name, engine in ENGINES.items():
            if engine.is_it(content):
                given = engine.read(content, hints, ranks)
                return ReadPlan(
                    name, _plan(given, hints, ranks), [*given.notes, *_noted(engine.note), *_assumed(hints)]
                )
        raise PlanError(f"is {shown(content)}, no placement of any of {', '.join(formats())}")
    except (PlanError, TraceError) as error:
        text = str(error)
        raise PlanError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _noted(note: str) -> list[str]:
    return [note] if note else []


def _assumed(hints: Hints) -> list[str]:
    return [] if hints.num_experts else ["the number of experts is taken from the largest in the file; give --model"]


def _plan(given: FilePlacement, hints: Hints, ranks: int | None) -> SlotPlan:
    stated = given.ranks
    _check_ranks(stated, ranks)
    experts = hints.num_experts or int(given.slots.max(initial=0)) + 1
    layers = given.layer_ids or hints.layer_ids or tuple(range(len(given.slots)))
    return SlotPlan(given.slots, stated or ranks or 1, experts, layers, hints.num_layers)


def _check_ranks(stated: int | None, ranks: int | None) -> None:
    if stated is None and ranks is None:
        raise PlanError("does not state how many ranks share its slots; give --ranks")
    if stated is not None and ranks is not None and stated != ranks:
        raise PlanError(f"is for {stated} ranks, not {ranks}; leave --ranks out or use another file")


def _content(path: Path) -> Any:
    """Arrays of an npz, or the value in a JSON or YAML file."""
    file, colon, name = str(path).rpartition(":")
    if colon and not path.exists() and Path(file).is_file():
        return _named(read_arrays(Path(file)), name)
    if not path.is_file():
        raise PlanError("no such file; check the path")
    raw = path.read_bytes()
    if not raw.strip():
        raise PlanError("the file is empty; get it again")
    if raw[:2] == b"PK":
        arrays = read_arrays(path)
        several = _names(arrays)
        if several and "phy2log" not in arrays:
            raise PlanError(f"has {len(several)} placements; give one of them, as in {path}:{several[0]}")
        return arrays
    try:
        return parse_json(raw)
    except TraceError:
        raise
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(f"neither npz nor JSON nor YAML ({reason}); the file is damaged or of another kind") from None


def _names(arrays: dict[str, np.ndarray]) -> list[str]:
    return [key.removeprefix("phy2log_") for key in arrays if key.startswith("phy2log_")]


def _named(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays of one of several placements."""
    if name not in _names(arrays):
        raise PlanError(f"is none of the placements in the file: {', '.join(_names(arrays)) or 'it has none by name'}")
    return {kind: arrays[f"{kind}_{name}"] for kind in ("phy2log", "log2phy", "logcnt") if f"{kind}_{name}" in arrays}


def write_slot_plan(path: Path, name: str, plan: SlotPlan) -> list[str]:
    """Write a plan in a format, whole or not at all; returns what the file cannot hold.

    Raises `PlanError` where the engine could not load it, and for an unknown format.
    """
    if name == OWN:
        write_plan(path, plan.placement())
        return []
    if name not in ENGINES:
        raise PlanError(f"--to is {name!r}, expected one of {', '.join(formats())}")
    engine = ENGINES[name]
    if engine.arrays is not None:
        with atomic_write(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, **engine.arrays(plan))
    elif engine.text is not None:
        written = engine.text(plan)
        with atomic_write(path) as aside:
            aside.write_text(written, encoding="utf-8")
    else:
        raise PlanError(f"--to is {name!r}, which is read alone; use another of {', '.join(formats())}")
    return _lost(name, engine, plan, path)


def _lost(name: str, engine: EngineFormat, plan: SlotPlan, path: Path) -> list[str]:
    lost = []
    if not engine.states_ranks:
        flags = "" if engine.flags is None else f", {engine.flags(plan, path)}"
        lost.append(f"{name} does not state the {plan.ranks} ranks: start the engine with as many{flags}")
    lost += _noted(engine.note)
    if engine.by_position and plan.layer_ids != tuple(range(len(plan.layer_ids))):
        lost.append(f"{name} counts layers with experts from 0, and does not hold their numbers in the model")
    if plan.repeated.any():
        lost.append(f"{int(plan.repeated.sum())} times a rank has an expert in several slots, which serves nobody")
    return lost


def numbers_layers(name: str) -> bool:
    """Whether a file in this format says of which layers of the model it is, dense ones counted."""
    return name == OWN or not ENGINES[name].by_position


def suffix_of_engine(name: str) -> str:
    """Of a file in this format."""
    return ".npz" if name == OWN else ENGINES[name].suffix
