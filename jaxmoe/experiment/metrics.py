"""What a sweep measures of a point, by name: means over layers and batches, as `jaxmoe evaluate` has them.

Energy, area and price are NaN where the machine does not state them, and empty in the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import Machine
from jaxmoe.latency import LayerTime
from jaxmoe.latency.schedule import STAGES

Scalar = Float[Array, ""]
Row = dict[str, Any]  # a point with its metrics, by column


class Outcome(NamedTuple):
    """What came of a point: times of all layers, stages [layer, batch] and busy times [layer, resource]."""

    times: LayerTime
    machine: Machine
    tokens: Scalar  # of a batch


@dataclass(frozen=True)
class Metric:
    """A number of an outcome. `part` is what the machine has to state for it, where not every one does."""

    column: str  # with the unit
    of: Callable[[Outcome], Scalar | None]
    lower_is_better: bool = True
    part: Literal["energy", "area", "price"] | None = None

    def is_stated(self, machine: Machine) -> bool:
        """Whether the machine states what the metric needs."""
        return self.part is None or getattr(machine, self.part) is not None

    def __call__(self, outcome: Outcome) -> Scalar:
        value = self.of(outcome) if self.is_stated(outcome.machine) else None
        return jnp.asarray(jnp.nan) if value is None else value


def _communication_share(times: LayerTime) -> Scalar:
    stages = sum(times.stages[name].mean() for name in STAGES)
    return times.communication.mean() / stages


METRICS = {
    "total": Metric("total_s", lambda seen: seen.times.total.mean()),
    "p95": Metric("p95_s", lambda seen: seen.times.p95.mean()),
    "dispatch": Metric("dispatch_s", lambda seen: seen.times.dispatch.mean()),
    "compute": Metric("compute_s", lambda seen: seen.times.compute.mean()),
    "combine": Metric("combine_s", lambda seen: seen.times.combine.mean()),
    # The part of the layer's time in which the mean node computes or waits for memory.
    "utilisation": Metric("utilisation", lambda seen: seen.times.node_time.mean() / seen.times.total.mean(), False),
    "communication_share": Metric("communication_share", lambda seen: _communication_share(seen.times)),
    # Seconds of the resource that is busy longest in a layer; which one it is comes with it.
    "busiest": Metric("busiest_s", lambda seen: jnp.concatenate([*busy_by_kind(seen.times).values()]).max()),
    # Of one layer: all that the machine states an energy of.
    "energy": Metric("energy_J", lambda seen: seen.times.total_energy.mean(), part="energy"),
    "energy_per_token": Metric(
        "energy_per_token_J", lambda seen: seen.times.total_energy.mean() / seen.tokens, part="energy"
    ),
    "area": Metric("area_mm2", lambda seen: seen.machine.area, part="area"),
    "price": Metric("machine_price", lambda seen: seen.machine.price, part="price"),
}

# What `jaxmoe.sweep.searches` finds, by name and column: the least time that anything tuning may return takes, and what
# a short tuning reaches.
SEARCHED = {"bound": "bound_s", "tuned": "tuned_s"}
COLUMNS = {name: metric.column for name, metric in METRICS.items()} | SEARCHED


def cost(row: Row, name: str) -> float:
    """The metric of a row, so that lower is better."""
    value = row[COLUMNS[name]]
    return value if name in SEARCHED or METRICS[name].lower_is_better else -value


def is_finite(value: float | None) -> bool:
    """Whether a row has a number there that others can be compared with."""
    return value is not None and isfinite(value)


def busy_by_kind(times: LayerTime) -> dict[str, Float[Array, " resource"]]:
    """Seconds that every node, link and port is busy in a layer, all stages together, as means over layers."""
    kinds: dict[str, list[Array]] = {}
    for stage in times.busy.values():
        for kind, seconds in stage.items():
            kinds.setdefault(kind, []).append(seconds.mean(axis=0))
    return {kind: jnp.stack(parts).sum(axis=0) for kind, parts in sorted(kinds.items())}


class Measured(NamedTuple):
    """Metrics in the order of `METRICS`, and which resource is busiest: an index into all kinds in turn."""

    metrics: Float[Array | np.ndarray, "*point metric"]
    busiest: Int[Array | np.ndarray, "*point"]
    found: Sequence[Mapping[str, float]] = ()  # of every point, by searches
