"""What is frozen: cases that decide, price and replay, in families that share a golden file."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from . import pricing, scenarios
from .store import HERE, WORSE, Arrays, differences, named, under


@dataclass(frozen=True)
class Case:
    """`decide` makes decisions and tells figures of its own; `price` has figures of stored decisions.

    Without `rules` decisions are drawn by hand. A case that is `searched` may end a little worse than it did, in the
    figures whose names begin so.
    """

    decide: Callable[[], tuple[Arrays, Arrays]]
    price: Callable[[Arrays], Arrays]
    rules: bool = True
    searched: str = ""


def recorded(case: Case) -> Arrays:
    """Decisions, figures, and what deciding told beside. Raises `ValueError` where deciding and pricing disagree."""
    decisions, told = case.decide()
    figures = case.price(decisions)
    alike = {name for name in told if name in figures}
    off = differences({n: told[n] for n in alike}, {n: figures[n] for n in alike}, 3 * HERE)
    if off:
        raise ValueError("deciding and pricing disagree: " + "; ".join(off))
    beside = {name: told[name] for name in told if name not in alike}
    return named(decisions, "decisions/") | named(figures, "figures/") | named(beside, "told/")


def worse(case: Case, decided: Arrays, figures: Arrays) -> list[str]:
    """Every figure in which newly decided ones are worse than a search may be."""
    found = case.price(decided)
    names = [name for name in figures if name.startswith(case.searched)]
    sums = {name: (found[name].sum(), figures[name].sum()) for name in names}
    return [f"{name} is {new:.6g}, expected {old:.6g}" for name, (new, old) in sums.items() if new > old * (1 + WORSE)]


# Systems on scenarios.


@lru_cache(maxsize=2)
def _runs(name: str) -> dict[str, pricing.Run]:
    ready = scenarios.ready(name)
    return pricing.runs_of(ready.inputs.scenario, ready.setting)


def _decide_scenario(name: str) -> tuple[Arrays, Arrays]:
    """The batches, the plan, and what every run decides."""
    ready = scenarios.ready(name)
    decisions = named(scenarios.frozen_batches(ready.batches), "batches/")
    decisions |= {"plan": ready.strategy.placement.share}
    decisions |= {"exchange": np.array(ready.strategy.placement.exchange)}
    told: Arrays = {}
    for run_name, run in _runs(name).items():
        decided, seen = pricing.decide(run, ready.batches)
        decisions |= named(decided, f"{run_name}/")
        told |= named(seen, f"{run_name}/")
    return decisions, told


def _price_scenario(name: str, decisions: Arrays) -> Arrays:
    """Every run of stored decisions, and one layer and step of each in the event simulator."""
    ready, batches = scenarios.ready(name), scenarios.thawed(under(decisions, "batches/"))
    setting = pricing.with_plan(ready.setting, decisions["plan"])
    layers, steps = batches.experts.shape[:2]
    step, row = steps - 1, layers - 1
    batch = jax.tree.map(lambda leaf: np.asarray(leaf[row, step]), batches)
    figures: Arrays = {}
    for run_name, run in pricing.runs_of(ready.inputs.scenario, setting).items():
        own = under(decisions, f"{run_name}/")
        found = pricing.price(run, own, batches) | pricing.replay(run, own, batch, step, row)
        figures |= named(found, f"{run_name}/")
    return figures


def _scenario(name: str) -> Case:
    return Case(lambda: _decide_scenario(name), lambda decisions: _price_scenario(name, decisions))


def _families() -> dict[str, dict[str, Case]]:
    made: dict[str, dict[str, Case]] = {}
    for name in scenarios.every():
        family = name.split("/")[0] if "/" in name else "top"
        made.setdefault(family, {})[name] = _scenario(name)
    return made


FAMILIES: dict[str, dict[str, Case]] = _families()
SMALLEST = "hd_moe/mixtral-8x7b_4x4_5TFLOPs_50GBps"
