"""Time of a point by stage and resource: how long every stage keeps each of them busy, and the bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import COMPUTE, NODE, STAGES
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.sweep.compile_groups import check_layers, with_exchange
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.search_metrics import bound_of


@dataclass(frozen=True)
class Resource:
    """A node, link or port, and how long every stage keeps it busy, s: means over layers and batches."""

    kind: str
    index: int
    place: str  # for people
    busy: dict[str, float]  # by stage

    @property
    def total(self) -> float:
        return sum(self.busy.values())


@dataclass(frozen=True)
class Explanation:
    """Times of a point, s, as means over layers and batches."""

    point: Point
    exchange: str
    stages: dict[str, float]
    total: float
    resources: list[Resource]  # the busiest first
    bound: float | None  # nothing that tuning may return does better; `None` where none fits or there is none
    note: str

    def busiest(self, stage: str) -> Resource:
        """The resource that a stage keeps busy longest."""
        return max(self.resources, key=lambda resource: resource.busy.get(stage, 0.0))

    def beside(self, stage: str) -> float:
        """Seconds of a stage beyond its busiest resource: delays of paths, and batches limited by another resource."""
        return max(self.stages[stage] - self.busiest(stage).busy[stage], 0.0)  # but for rounding it is never less


LEAST_OF_HASH = 6  # letters, so that a row number that is too large is not taken for one


def find_point(points: Sequence[Point], text: str) -> Point:
    """The point of a hash, the beginning of one, or a row number of the study's points from 0. Raises `SweepError`."""
    if text.isdecimal() and int(text) < len(points):
        return points[int(text)]
    same = [point for point in points if point.hash.startswith(text)] if len(text) >= LEAST_OF_HASH else []
    if len(same) == 1:
        return same[0]
    expected = (
        f"a hash of the results or its first {LEAST_OF_HASH} letters, or a row number from 0 to {len(points) - 1}"
    )
    raise SweepError(f"--explain is {text!r}; expected {expected}")


def explained(space: Space, point: Point) -> Explanation:
    """Evaluate a point by itself. Raises `InputError` where it cannot be."""
    if space.study.has_systems:
        raise SweepError("--explain tells of strategies, but the point is a system; jaxmoe simulate tells of systems")
    scenario = space.scenario(point.values)
    check_layers(space, scenario)
    inputs = inputs_of(scenario, layers=space.study.layers)
    usual = next(usual for usual in standard_strategies(inputs) if usual.name == point.values["strategy"])
    strategy = with_exchange(inputs, usual, point.values["exchange"])
    name = strategy.placement.exchange[0]
    times = score(inputs, strategy, inputs.evaluation_batches, name)
    return Explanation(
        point=point,
        exchange=name,
        stages={stage: float(times.stages[stage].mean()) for stage in STAGES},
        total=float(times.mean.mean()),
        resources=_resources(inputs, times),
        bound=bound_of(inputs, strategy, inputs.exchange(name), inputs.evaluation_batches),
        note=strategy.note,
    )


def _resources(inputs: Inputs, times: LayerTime) -> list[Resource]:
    """Every resource with its busy seconds, the busiest first."""
    ends = np.asarray(inputs.model.machine.topology.link_ends)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for stage, kinds in times.busy.items():
        for kind, seconds in kinds.items():
            if kind == NODE:
                continue  # it is told as its compute and its memory levels
            for index, value in enumerate(seconds.mean(axis=0)):
                found.setdefault((kind, index), {})[stage] = float(value)
    nodes, first = inputs.num_nodes, inputs.model.machine.topology.injection_bandwidth is not None

    def place(kind: str, index: int) -> str:
        if kind == "link":
            return f"link {ends[index][0]} to {ends[index][1]}"
        if kind == "port":
            sends = first and index < nodes
            return f"{'injection' if sends else 'ejection'} port of node {index % nodes}"
        return f"compute of node {index}" if kind == COMPUTE else f"channel {index} of {kind}"

    resources = [Resource(kind, index, place(kind, index), busy) for (kind, index), busy in found.items()]
    return sorted(resources, key=lambda resource: -resource.total)
