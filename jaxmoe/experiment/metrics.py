"""Metrics of a point of a sweep, registered in `jaxmoe.registry.METRICS`: means over layers and batches.

Energy, area and price are NaN where the machine does not state them, and empty in the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.config import HardwareConfig, build_machine
from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import NODE, STAGES
from jaxmoe.hardware import Machine
from jaxmoe.registry import METRICS, PartError

Scalar = Float[Array, ""]
Row = dict[str, Any]  # a point with its metrics, by column


class Outcome(NamedTuple):
    """Times of a point of a sweep, s: stages [layer, batch], busy times [layer, resource]. Machine and batch size."""

    times: LayerTime
    machine: Machine
    tokens: Scalar  # of a batch


@dataclass(frozen=True)
class Metric:
    """A number of an outcome. `part` is an attribute of `Machine` that it needs, where not every machine states it.

    A number that is not there is `None` or NaN, and empty in the results.
    """

    column: str  # of the results: a name that ends with the unit
    of: Callable[[Outcome], Scalar | None]
    lower_is_better: bool = True
    part: str | None = None

    def is_stated(self, machine: Machine) -> bool:
        """Whether the machine states what the metric needs."""
        return self.part is None or getattr(machine, self.part) is not None

    def __call__(self, outcome: Outcome) -> Scalar:
        value = self.of(outcome) if self.is_stated(outcome.machine) else None
        return jnp.asarray(jnp.nan) if value is None else value


def _stage(name: str) -> Callable[[Outcome], Scalar | None]:
    """Mean seconds of a stage; none where a system has no such stage."""
    return lambda seen: seen.times.stages[name].mean() if name in seen.times.stages else None


def _utilisation(seen: Outcome) -> Scalar | None:
    """The part of the layer's time in which the mean node computes or waits for memory."""
    return seen.times.node_time.mean() / seen.times.total.mean()


def _communication_share(seen: Outcome) -> Scalar | None:
    times = seen.times
    if not set(STAGES) <= set(times.stages):
        return None
    return times.communication.mean() / sum(times.stages[name].mean() for name in STAGES)


TOTAL = Metric("total_s", lambda seen: seen.times.total.mean())
P95 = Metric("p95_s", lambda seen: seen.times.p95.mean())
DISPATCH, COMPUTE, COMBINE = (Metric(f"{name}_s", _stage(name)) for name in STAGES)
UTILISATION = Metric("utilisation", _utilisation, False)
COMMUNICATION_SHARE = Metric("communication_share", _communication_share)
# Seconds of the resource that is busy longest in a layer; which one it is comes with it.
BUSIEST = Metric("busiest_s", lambda seen: jnp.concatenate([*busy_by_kind(seen.times).values()]).max())
# Of one layer: all that the machine states an energy of.
ENERGY = Metric("energy_J", lambda seen: seen.times.total_energy.mean(), part="energy")
ENERGY_PER_TOKEN = Metric(
    "energy_per_token_J", lambda seen: seen.times.total_energy.mean() / seen.tokens, part="energy"
)
AREA = Metric("area_mm2", lambda seen: seen.machine.area, part="area")
PRICE = Metric("machine_price", lambda seen: seen.machine.price, part="price")

# Found by `jaxmoe.sweep.search_metrics`, by name and column: the least time that anything tuning may return takes, and
# the time that a short tuning reaches.
SEARCHED = {"bound": "bound_s", "tuned": "tuned_s"}


def columns() -> dict[str, str]:
    """The column of every metric, by its name. Raises `PartError` where two have the same one."""
    named = {name: metric.column for name, metric in METRICS.items()} | SEARCHED
    for name, column in named.items():
        first = next(other for other in named if named[other] == column)
        if first != name:
            raise PartError(f"metric {name!r} has the column {column!r} of {first!r}; give it another one")
    return named


def column_of(name: str) -> str:
    """The column of a metric."""
    return SEARCHED[name] if name in SEARCHED else METRICS[name].column


def cost(row: Row, name: str) -> float:
    """The metric of a row, so that lower is better."""
    value = row[column_of(name)]
    return value if name in SEARCHED or METRICS[name].lower_is_better else -value


def is_finite(value: float | None) -> bool:
    """Whether a row has a number there that others can be compared with."""
    return value is not None and isfinite(value)


def busy_by_kind(times: LayerTime) -> dict[str, Float[Array, " resource"]]:
    """Seconds that every resource is busy in a layer, all stages together, as means over layers, by kind.

    Nodes are there as their compute and their memory levels.
    """
    kinds: dict[str, list[Array]] = {}
    for stage in times.busy.values():
        for kind, seconds in stage.items():
            if kind != NODE:
                kinds.setdefault(kind, []).append(seconds.mean(axis=0))
    return {kind: jnp.stack(parts).sum(axis=0) for kind, parts in sorted(kinds.items())}


class Measured(NamedTuple):
    """Metrics in the order of `METRICS`, and which resource is busiest: an index into all kinds in turn."""

    metrics: Float[Array | np.ndarray, "*point metric"]
    busiest: Int[Array | np.ndarray, "*point"]
    found: Sequence[Mapping[str, float]] = ()  # of every point, by searches


# Whether machines state what a metric needs: energies, areas, prices.

EXAMPLES = {"energy": "link.energy_pJ_per_B", "area": "die.area_mm2", "price": "die.price"}  # of keys to state


def parts_of(names: Sequence[str]) -> dict[str, str]:
    """Parts of a machine that these metrics need, by metric; those that need none, and unknown ones, are left out."""
    return {name: part for name in names if name in METRICS and (part := METRICS[name].part)}


def unstated(names: Sequence[str], machines: Sequence[HardwareConfig]) -> str:
    """Why one of these metrics cannot be had, where no machine states its numbers; empty where all can, or there is
    no machine."""
    parts = parts_of(names)
    built = [build_machine(hardware) for hardware in machines] if parts else []
    for name, part in parts.items():
        if built and not any(map(METRICS[name].is_stated, built)):
            example = f"write for example hardware.{EXAMPLES[part]} under set, or " if part in EXAMPLES else ""
            return (
                f"the metric {name} is wanted, but no machine of the study states any {part}; {example}leave {name} out"
            )
    return ""
