"""Points that are systems: rolled out over iterations, as `jaxmoe simulate` does, and measured as others are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import Measured, Outcome, busy_by_kind
from jaxmoe.experiment.simulation import iterations_of, setting_of
from jaxmoe.methods import system_of
from jaxmoe.registry import METRICS
from jaxmoe.sweep.compile_groups import Group

TOGETHER = 8  # points that are handed on, and so written, at once


def rolled_out(group: Group, resources: list[tuple[str, int]]) -> Iterator[tuple[Group, slice, Measured | None]]:
    """Points of a group, some at a time, with their metrics; or a group with the reason why they cannot be.

    `resources` are those of the machine, in the order that `Measured.busiest` counts them.
    """
    for start in range(0, len(group.points), TOGETHER):
        part = slice(start, min(start + TOGETHER, len(group.points)))
        try:
            rows = [_measured(group, numbers, resources) for numbers in group.numbers[part]]
        except InputError as error:
            yield replace(group, run=None, strategy=None, reason=str(error)), part, None
            continue
        metrics, busiest = (np.stack(each) for each in zip(*rows, strict=True))
        yield group, part, Measured(metrics, busiest, [{} for _ in rows])


def _measured(group: Group, numbers: np.ndarray, resources: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """All metrics of one point, and the index of its busiest resource, -1 where the system reports none."""
    run, system, plan = group.run, group.system, group.strategy
    assert run is not None
    assert system is not None
    assert plan is not None
    inputs = run.at(numbers)
    inputs = replace(inputs, scenario=inputs.scenario.model_copy(update={"system": system}))
    steps = iterations_of(inputs, group.iterations)
    made = system_of(system.name, **system.model_dump(exclude={"name", "plan"}))
    *_, rollout = made.runs(setting_of(inputs, plan, steps.history)).values()  # the last is the system itself
    times = jax.tree.map(jnp.asarray, rollout.rollout(steps.batches).time.by_layer())
    outcome = Outcome(times, inputs.model.machine, jnp.asarray(float(inputs.scenario.workload.batch_tokens)))
    busy = busy_by_kind(times)
    counts = {kind: sum(each == kind for each, _ in resources) for kind, _ in resources}
    seconds = np.concatenate([_of_size(busy.get(kind, ()), count) for kind, count in counts.items()])
    metrics = np.array([float(metric(outcome)) for metric in METRICS.values()])
    return metrics, np.asarray(seconds.argmax() if seconds.any() else -1)


def _of_size(busy: Any, count: int) -> np.ndarray:
    """Busy seconds of so many resources; none where the system counts others."""
    return np.asarray(busy) if len(busy) == count else np.zeros(count)
