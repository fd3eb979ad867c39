"""What a sweep measures of a point, by name: means over layers and batches, as `jaxmoe evaluate` has them."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.latency import LayerTime
from jaxmoe.latency.schedule import STAGES

Scalar = Float[Array, ""]
Row = dict[str, Any]  # a point with its metrics, by column


@dataclass(frozen=True)
class Metric:
    """A number of the times of all layers, stages [layer, batch] and busy times [layer, resource]."""

    column: str  # with the unit
    of: Callable[[LayerTime], Scalar]
    lower_is_better: bool = True


def _communication_share(times: LayerTime) -> Scalar:
    stages = sum(times.stages[name].mean() for name in STAGES)
    return times.communication.mean() / stages


METRICS = {
    "total": Metric("total_s", lambda times: times.total.mean()),
    "p95": Metric("p95_s", lambda times: times.p95.mean()),
    "dispatch": Metric("dispatch_s", lambda times: times.dispatch.mean()),
    "compute": Metric("compute_s", lambda times: times.compute.mean()),
    "combine": Metric("combine_s", lambda times: times.combine.mean()),
    # The part of the layer's time in which the mean node computes or waits for memory.
    "utilisation": Metric("utilisation", lambda times: times.node_time.mean() / times.total.mean(), False),
    "communication_share": Metric("communication_share", _communication_share),
    # Seconds of the resource that is busy longest in a layer; which one it is comes with it.
    "busiest": Metric("busiest_s", lambda times: jnp.concatenate([*busy_by_kind(times).values()]).max()),
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
