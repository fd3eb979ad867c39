"""Groups of points evaluated in chunks: one compiled function of the numbers, over all local devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.config.systems import SystemConfig
from jaxmoe.engine.times import COMPUTE
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import Measured, Outcome, busy_by_kind
from jaxmoe.experiment.parametric import ParametricRun, outcome_at
from jaxmoe.experiment.simulation import iterations_of, setting_of
from jaxmoe.memory import device_memory
from jaxmoe.methods import system_of
from jaxmoe.registry import METRICS
from jaxmoe.sweep.compile_groups import Group, Refused
from jaxmoe.sweep.search_metrics import SearchMetrics
from jaxmoe.tune.machine.designs import EvaluationArguments

MOST = 2048  # points of a chunk: as many as are lost at most when a sweep is killed
MOST_SEARCHED = 64  # where metrics take a search for every one of them
TOGETHER = 128  # points of a device at once: what is computed of so many stays in its caches
PART_OF_MEMORY = 0.25  # of the machine's, where no limit is given
FAR = 4  # a chunk of so many times the points that are wanted, or so many times fewer, is not worth a compilation


def most_points(searched: Sequence[str]) -> int:
    """The most points of a chunk; fewer where one of the metrics takes a search for every point."""
    return min(MOST, MOST_SEARCHED) if searched else MOST


Evaluated = tuple[Group | Refused, slice, Measured | None]
"""A group, which of its points, and their metrics in NumPy; `None` where they could not be set up."""


def given(group: Group) -> EvaluationArguments:
    """Arguments that all points of a group share: layer model, shares, batches and exchange."""
    inputs, share = group.run.inputs, jnp.asarray(group.strategy.placement.share)
    return EvaluationArguments(inputs.model, share, group.run.batches, inputs.exchange(group.exchange))


def metrics_at(run: ParametricRun, numbers: Float[Array, " key"], common: EvaluationArguments) -> Measured:
    """All metrics of one point, and the index of its busiest resource."""
    outcome = outcome_at(run, numbers, common)
    busy = jnp.concatenate([*busy_by_kind(outcome.times).values()])
    return Measured(jnp.stack([metric(outcome) for metric in METRICS.values()]), busy.argmax())


def resources(run: ParametricRun) -> list[tuple[str, int]]:
    """Kind and index of every resource, in the order that `Measured.busiest` counts them."""
    machine = run.inputs.model.machine
    topology = machine.topology
    limits = (topology.injection_bandwidth, topology.ejection_bandwidth)
    ports = sum(topology.num_nodes for limit in limits if limit is not None)
    counts = {"link": topology.num_links, COMPUTE: topology.num_nodes, "port": ports}
    counts |= {name: len(level.bandwidth) for name, level in machine.levels.items()}
    return [(kind, index) for kind, count in sorted(counts.items()) for index in range(count)]


Compiled = Callable[..., Any]


@dataclass
class SweepEvaluator:
    """Evaluates groups of points in chunks, by one compiled function for groups that can share it.

    Groups share it if they have the same run, form of exchange and shapes, and about the same size. `memory_bytes`
    limits the memory of a chunk on all devices, B; 0 is a fixed part of what there is. `searched` names the metrics
    that take a search. `compiles` counts compilations, `too_large` those whose chunk exceeded the limit.
    """

    memory_bytes: float = 0.0
    searched: tuple[str, ...] = ()
    most: int = 0  # points of a chunk; by default as many as may be lost
    compiles: int = 0
    too_large: int = 0
    _compiled: dict[tuple, list[tuple[Compiled, int]]] = field(default_factory=dict)
    _fitting: dict[tuple, int] = field(default_factory=dict)  # points of a chunk, where memory limits them
    _run: ParametricRun | None = None
    _searches: SearchMetrics = field(default_factory=SearchMetrics)

    def __post_init__(self) -> None:
        self.most = self.most or most_points(self.searched)
        devices = np.array(jax.local_devices())
        self.devices = len(devices)
        mesh = Mesh(devices, ("point",))
        self._spread, self._same = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("point",), ()))
        if not self.memory_bytes:
            self.memory_bytes = PART_OF_MEMORY * device_memory()

    def evaluated(self, groups: Iterable[Group | Refused]) -> Iterator[Evaluated]:
        """Metrics of all points of these groups, chunk by chunk."""
        for group in groups:
            if isinstance(group, Refused):
                yield group, slice(None), None
            elif group.system is not None:
                yield from rolled_out(group, group.system, resources(group.run))
            else:
                yield from ((group, part, measured) for part, measured in self.chunks(group))

    def close(self) -> None:
        """Do nothing: no process or file has to be closed. For use in place of `Cluster`."""

    def chunks(self, group: Group) -> Iterator[tuple[slice, Measured]]:
        """Chunks of a group: a slice of its points, and their metrics in NumPy."""
        run, common, exact = group.run, given(group), group.numbers
        numbers = exact.astype(np.float32)
        common = jax.device_put(common, self._same)
        function, size = self._function(run, len(group.points), common)
        for start in range(0, len(numbers), size):
            rows = numbers[start : start + size]
            padded = np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])
            measured = function(jax.device_put(padded, self._spread), common)
            part = slice(start, start + len(rows))
            metrics, busiest = (np.asarray(leaf)[: len(rows)] for leaf in measured[:2])
            found = self._searches.found(group, exact[part], self.searched)
            yield part, Measured(metrics, busiest, found)

    def _function(self, run: ParametricRun, points: int, common: EvaluationArguments) -> tuple[Compiled, int]:
        """The compiled function of a chunk, and the number of its points."""
        if run is not self._run:
            self._compiled.clear()  # points come run by run
            self._fitting.clear()
            self._run = run
        leaves, structure = jax.tree.flatten(common)
        key = (structure, *(leaf.shape for leaf in leaves))  # all rings have one structure
        wanted = self._even(-(-points // -(-points // self.most)))
        wanted = min(wanted, self._fitting.get(key, wanted))
        known = self._compiled.setdefault(key, [])
        for compiled, size in known:
            if wanted <= FAR * size and size <= FAR * wanted:
                return compiled, size
        known.append(self._compile_to_fit(run, common, wanted))
        if known[-1][1] < wanted:
            self._fitting[key] = known[-1][1]
        return known[-1]

    def _compile_to_fit(self, run: ParametricRun, common: EvaluationArguments, size: int) -> tuple[Compiled, int]:
        """Compile for a chunk of `size` points, or for fewer where that exceeds the memory limit; returns their number.

        A chunk of one point for each device is accepted whatever memory it takes.
        """
        compiled, taken = self._compile(run, common, size)
        while taken > self.memory_bytes and size > self.devices:
            self.too_large += 1
            # Memory grows with the points of a block but for a fixed part: a little less spares another attempt.
            block = _block(size // self.devices)
            size = max(min(int(0.9 * block * self.memory_bytes / taken), block - 1), 1) * self.devices
            compiled, taken = self._compile(run, common, size)
        return compiled, size

    def _even(self, points: int) -> int:
        """The next number of points that all devices share evenly, in blocks where there are many."""
        of_one = -(-points // self.devices)
        return (of_one if of_one <= TOGETHER else -(-of_one // TOGETHER) * TOGETHER) * self.devices

    def _compile(self, run: ParametricRun, common: EvaluationArguments, points: int) -> tuple[Compiled, float]:
        """The compiled function of numbers [point, key] and `common`, and its memory on all devices, B.

        Blocks of points are evaluated one after the other. XLA computes what is equal for all points once, before.
        """
        at_once = _block(points // self.devices) * self.devices

        def chunk(numbers: Float[Array, "point key"], common: EvaluationArguments) -> Measured:
            # Points of a device are successive ones, and a block has some of every device.
            blocks = jnp.swapaxes(numbers.reshape(at_once, points // at_once, numbers.shape[1]), 0, 1)
            measured = jax.lax.map(jax.vmap(lambda each: metrics_at(run, each, common)), blocks)
            return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(points, *leaf.shape[2:]), measured)

        shape = jax.ShapeDtypeStruct((points, len(run.keys)), jnp.float32)
        jitted = jax.jit(chunk, in_shardings=(self._spread, self._same), out_shardings=self._spread)
        compiled = jitted.lower(shape, common).compile()
        self.compiles += 1
        sizes: Any = compiled.memory_analysis()
        taken = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return compiled, float(taken * self.devices)


def _block(points: int) -> int:
    """Points of a device at once, where it has so many in all."""
    return max(part for part in range(1, min(points, TOGETHER) + 1) if points % part == 0)


# Points that are systems: rolled out over iterations, as `jaxmoe simulate` does, and measured as others are.

HANDED_ON = 8  # points that are handed on, and so written, at once


def rolled_out(group: Group, system: SystemConfig, resources: list[tuple[str, int]]) -> Iterator[Evaluated]:
    """Points of a group, some at a time, with their metrics; or those with the reason why they cannot be.

    `resources` are those of the machine, in the order that `Measured.busiest` counts them.
    """
    for start in range(0, len(group.points), HANDED_ON):
        part = slice(start, min(start + HANDED_ON, len(group.points)))
        try:
            rows = [_measured(group, system, numbers, resources) for numbers in group.numbers[part]]
        except InputError as error:
            yield Refused(group.points[part], str(error)), slice(None), None
            continue
        metrics, busiest = (np.stack(each) for each in zip(*rows, strict=True))
        yield group, part, Measured(metrics, busiest, [{} for _ in rows])


def _measured(
    group: Group, system: SystemConfig, numbers: np.ndarray, resources: list[tuple[str, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """All metrics of one point, and the index of its busiest resource, -1 where the system reports none."""
    inputs = group.run.at(numbers)
    inputs = replace(inputs, scenario=inputs.scenario.model_copy(update={"system": system}))
    steps = iterations_of(inputs, group.iterations)
    made = system_of(system.name, **system.model_dump(exclude={"name", "plan"}))
    *_, rollout = made.runs(setting_of(inputs, group.strategy, steps.history)).values()  # the last is the system itself
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
