"""What is frozen: cases that decide, price and replay, in families that share a golden file."""

from functools import lru_cache

import jax
import numpy as np

from . import others, scenarios
from .case import Case
from .pricing import systems
from .store import Arrays, named, under

# Systems on scenarios.


@lru_cache(maxsize=2)
def _runs(name: str) -> dict[str, systems.Run]:
    ready = scenarios.ready(name)
    return systems.runs_of(ready.inputs.scenario, ready.setting)


def _decide_scenario(name: str) -> tuple[Arrays, Arrays]:
    """The batches, the plan, and what every run decides."""
    ready = scenarios.ready(name)
    decisions = named(scenarios.frozen_batches(ready.batches), "batches/")
    decisions |= {"plan": ready.strategy.placement.share}
    decisions |= {"exchange": np.array(ready.strategy.placement.exchange)}
    told: Arrays = {}
    for run_name, run in _runs(name).items():
        decided, seen = systems.decide(run, ready.batches)
        decisions |= named(decided, f"{run_name}/")
        told |= named(seen, f"{run_name}/")
    return decisions, told


def _price_scenario(name: str, decisions: Arrays) -> Arrays:
    """Every run of stored decisions, and one layer and step of each in the event simulator."""
    ready, batches = scenarios.ready(name), scenarios.thawed(under(decisions, "batches/"))
    setting = systems.with_plan(ready.setting, decisions["plan"])
    layers, steps = batches.experts.shape[:2]
    step, row = steps - 1, layers - 1
    batch = jax.tree.map(lambda leaf: np.asarray(leaf[row, step]), batches)
    figures: Arrays = {}
    for run_name, run in systems.runs_of(ready.inputs.scenario, setting).items():
        own = under(decisions, f"{run_name}/")
        found = systems.price(run, own, batches) | systems.replay(run, own, batch, step, row)
        figures |= named(found, f"{run_name}/")
    return figures


def _scenario(name: str) -> Case:
    return Case(lambda: _decide_scenario(name), lambda decisions: _price_scenario(name, decisions))


def _families() -> dict[str, dict[str, Case]]:
    made: dict[str, dict[str, Case]] = {}
    for name in scenarios.every():
        family = name.split("/")[0] if "/" in name else "top"
        made.setdefault(family, {})[name] = _scenario(name)
    return made | others.FAMILIES


FAMILIES: dict[str, dict[str, Case]] = _families()
SMALLEST = "hd_moe/mixtral-8x7b_4x4_5TFLOPs_50GBps"
