"""Insights 4 to 6 as initial placement, each alone and with the four policies."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from runs import (
    MAIN_MACHINES,
    MODELS,
    POLICIES,
    PROMPT,
    SETTINGS,
    Case,
    beside,
    homes,
    machine_of,
    measured,
    policy_of,
    requests_of,
    topics_of,
)

from jaxmoe.methods import copies_that_fit
from jaxmoe.methods.wafer_gpu.system import popular_copies
from jaxmoe.placement.strategies import expert_parallel_balanced

COPIES = 4  # popular experts of a layer that every die has a copy of, Insight 4
SIZE = 4096


def tables(model: str) -> Iterator[dict[str, Any]]:
    """Every insight at batches of 4,096; the last one on those requests that are of one topic."""
    drawn = requests_of(model, SIZE)
    case = Case(model, drawn)
    for machine in MAIN_MACHINES:
        yield from _compared(case, machine, SIZE, _placements(case, machine))
    topics = topics_of(model, SIZE)
    common = np.bincount(topics).argmax()
    case = Case(model, drawn[:, np.flatnonzero(topics == common)[:SIZE]])
    for machine in MAIN_MACHINES:
        dies = machine_of(machine).num_nodes
        ways = {
            "none, one topic": homes(model, dies),
            "4: balanced by all topics": _balanced(prompt_load(drawn, model), dies),
            "6: balanced by the topic": _balanced(prompt_load(case.experts, model), dies),
        }
        placed = {name: {"home": home} for name, home in ways.items()}
        yield from _compared(case, machine, case.experts.shape[1], placed)


def _placements(case: Case, machine: str) -> dict[str, dict[str, Any]]:
    known, chip = MODELS[case.model], machine_of(machine)
    even, load = homes(case.model, chip.num_nodes), prompt_load(case.experts, case.model)
    room = copies_that_fit(np.asarray(chip.capacity, float), even, known.weights, known.layers)
    return {
        "none": {},
        f"4: copies of the {COPIES} most popular": {"start": popular_copies(load, even, room, COPIES)},
        "4: popular ones apart": {"home": _balanced(load, chip.num_nodes)},
        "5: pairs apart": {"home": pairs_apart(chosen_together(case), load, chip.num_nodes)},
    }


def _compared(case: Case, machine: str, batch: int, ways: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    known = case.guidance(SETTINGS["top"])
    for name in ("base", "allo", "allo+pred"):
        rows = [
            {"model": case.model, "machine": machine, "batch": batch, "policy": name, "insight": insight}
            | measured(case.model, machine, policy_of(case.model, machine, **change, **POLICIES[name]), known)
            for insight, change in ways.items()
        ]
        yield from beside(rows, rows[0])


def prompt_load(experts: np.ndarray, model: str) -> np.ndarray:
    """How often the prompts chose each expert, int [layer, expert]."""
    prompts = experts[:, :, :PROMPT].reshape(len(experts), -1)
    return np.stack([np.bincount(row, minlength=MODELS[model].experts) for row in prompts])


def _balanced(load: np.ndarray, dies: int) -> np.ndarray:
    """Homes in equal numbers with loads as even as may be."""
    return expert_parallel_balanced(load, dies).argmax(axis=-1)


def chosen_together(case: Case) -> np.ndarray:
    """How often a token of the prompts chose both of two experts, [layer, expert, expert]."""
    size = MODELS[case.model].experts
    found = np.zeros((len(case.experts), size, size))
    for token in range(PROMPT):
        chosen = case.experts[:, :, token].astype(np.int64)
        place = chosen[..., :, None] * size + chosen[..., None, :]
        found += np.stack([np.bincount(row.ravel(), minlength=size**2).reshape(size, size) for row in place])
    return found


def pairs_apart(together: np.ndarray, load: np.ndarray, dies: int) -> np.ndarray:
    """Homes in equal numbers: the most popular first, each to the die whose experts it is least often chosen with."""
    layers, experts = load.shape
    home = np.full((layers, experts), -1)
    for layer in range(layers):
        shared = np.zeros((experts, dies))
        room = np.bincount(np.arange(experts) % dies, minlength=dies)
        for expert in np.argsort(-load[layer], kind="stable"):
            die = np.where(room > 0, shared[expert], np.inf).argmin()
            home[layer, expert] = die
            room[die] -= 1
            shared[:, die] += together[layer, :, expert]
    return home
