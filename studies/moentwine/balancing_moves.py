"""What moves the claims that are missed: more skew, more tokens, groups of other sizes, experts that devices share.

Tables of `balancing.py`, 60 iterations each, mixed scenarios.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from balancing_cases import (
    RACK,
    TOKENS,
    WAFERS,
    WARM,
    Method,
    Place,
    figures_of,
    layout_of,
    loads_of,
    mixture_of,
    moe_of,
    peak_of_devices,
    run,
    shares_of,
    sharpened,
)
from scipy.optimize import brentq

ITERATIONS = 3 * WARM
PAPER_EXCESS, PAPER_PEAK = 2.0, 2.9  # VI-C1 and Fig. 12
NONE, HIDDEN = Method("none", invasive=True), Method("topology_aware", invasive=False)
Row = dict[str, object]


def skew(shared: Path) -> Iterator[Row]:
    """Excess and what balancing gains where shares are raised to a power: one that gives the paper's excess without a
    balancer, one that gives its peak of Fig. 12. The order of experts is that of the preset."""
    shares, mixture = shares_of(WAFERS.model), mixture_of(WAFERS, "mixed", "decode", ITERATIONS, shared)
    levels = {
        "preset": 1.0,
        "excess of 2": _power(lambda power: _excess(sharpened(shares, power), mixture[WARM:]), PAPER_EXCESS),
        "peak of 2.9": _power(lambda power: peak_of_devices(sharpened(shares, power)).max(), PAPER_PEAK),
    }
    cases = [(RACK, method) for method in (NONE, HIDDEN)]
    cases += [(WAFERS, method) for method in (NONE, HIDDEN)]
    for level, power in levels.items():
        for phase in ("prefill", "decode"):
            for place, method in cases:
                given = loads_of(place, "mixed", phase, ITERATIONS, shared, power=power)
                known = {"level": level, "power": power, "peak_of_8": peak_of_devices(sharpened(shares, power)).max()}
                yield known | _line(place, phase, method, given)


def _power(value: Callable[[float], float], target: float) -> float:
    """The power at which a figure is what the paper has."""
    return float(brentq(lambda power: value(power) - target, 1.0, 8.0, xtol=1e-4))


def _excess(shares: np.ndarray, mixture: np.ndarray) -> float:
    """Of one expert on each device, the mean over iterations and layers of what is to be expected."""
    loads = np.einsum("is,sle->ile", mixture, shares)
    return float((loads.max(axis=2) / loads.mean(axis=2) - 1).mean())


def tokens(shared: Path) -> Iterator[Row]:
    """NVL72 with and without a balancer by the tokens of a group, decode; also with that which asks for times."""
    methods = (NONE, HIDDEN, Method("gradient", invasive=False, horizon=100.0))
    for count in (256, 512, 1024, 2048):
        place = replace(RACK, tokens=count)
        given = loads_of(place, "mixed", "decode", ITERATIONS, shared)
        for method in methods:
            yield {"tokens": count} | _line(place, "decode", method, given)


def adding(shared: Path) -> Iterator[Row]:
    """What balancing gains, and what wafers gain over NVL72 and NVL72 over four DGX nodes, where dies read memory while
    they multiply, and where both add up (`die.overlap`)."""
    cluster = Place("dgx_b200_4x8", "successive", 4)
    for phase, place, overlap in product(("prefill", "decode"), (cluster, RACK, WAFERS), (True, False)):
        own = replace(place, machine=f"{place.machine}:die.overlap={str(overlap).lower()}")
        given = loads_of(own, "mixed", phase, ITERATIONS, shared)
        for method in (NONE, HIDDEN):
            told = {"memory_and_products": "overlap" if overlap else "add"}
            yield told | _line(own, phase, method, given)


def groups(shared: Path) -> Iterator[Row]:
    """Fig. 17's three mappings by the devices of a group, which VI-D does not state; without a balancer, prefill.

    There are as many tokens on each device everywhere.
    """
    for tp, layout in product((2, 4, 8, 16), ("baseline", "er", "her")):
        place = replace(WAFERS, tp=tp, layout=layout, tokens=TOKENS["prefill"] * tp // WAFERS.tp)
        given = loads_of(place, "mixed", "prefill", ITERATIONS, shared)
        yield {"tp": tp, "layout": layout} | _line(place, "prefill", NONE, given)


def sharing(shared: Path) -> Iterator[Row]:
    """Fewer experts than devices (E/D below 1): four, six and eight wafers, with as many tokens on each device.

    EPLB places copies, on idle links; devices without an expert are slots like others.
    Without shadow slots, as III-A has it: four wafers have each expert once, more have copies of what is loaded most.
    With one shadow slot a device four wafers have copies as well.
    """
    for phase in ("prefill", "decode"):
        for grid, shadow in (("2, 2", 0), ("2, 2", 1), ("2, 3", 0), ("2, 4", 0)):
            place = replace(WAFERS, machine=f"{WAFERS.machine}:grid=[{grid}]")
            copied = shadow or grid != "2, 2"
            method = Method("eplb" if copied else "none", invasive=not copied, shadow=shadow)
            given = loads_of(place, "mixed", phase, ITERATIONS, shared)
            experts_per_device = moe_of(place.model).num_experts / layout_of(place).num_nodes
            known = {"experts_per_device": experts_per_device, "shadow_slots": shadow}
            yield known | _line(place, phase, method, given)


def _line(place: Place, phase: str, method: Method, given: np.ndarray) -> Row:
    known = {"phase": phase, "machine": place.machine.split(":")[0], "devices": layout_of(place).num_nodes}
    return known | {"balancer": method.name} | figures_of(run(method, place, phase, given), WARM)
