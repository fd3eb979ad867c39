"""The resource that limits a layer, found outside `jit`: its stage, its kind, and its place in the machine."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import NOT_MEMORY
from jaxmoe.hardware import AbstractTopology


def resource_name(kind: str) -> str:
    """A kind of resource for people: a memory level says that it is one."""
    return kind if kind in NOT_MEMORY or kind == "memory" else f"memory: {kind}"


class LayerLimit(NamedTuple):
    """The longest stage of a layer and the resource that it waits for.

    `resource` is `link`, `port`, `pair`, `compute`, the name of a memory level, or `latency`; `place` are the ends of a
    link, or the number of a node, port or channel. `part` is what the stage takes of the layer's time.
    """

    stage: str
    resource: str
    place: int | list[int] | None
    seconds: float
    part: float

    @property
    def name(self) -> str:
        """The resource for people."""
        return resource_name(self.resource)

    @property
    def text(self) -> str:
        """The resource for people, with its stage where that is another word."""
        return self.name if self.resource == self.stage else f"{self.name} in {self.stage}"

    @property
    def where(self) -> str:
        """The place for people, as `node 3` or `link 2 to 3`; empty where it is none."""
        if self.place is None:
            return ""
        if isinstance(self.place, list):
            return f"link {self.place[0]} to {self.place[1]}"
        kind = {"compute": "node", "port": "port", "pair": "pair"}.get(self.resource, "channel")
        return f"{kind} {self.place}"


def layer_limit(time: LayerTime, topology: AbstractTopology) -> LayerLimit:
    """The limit of one layer, as a mean over its batches."""
    stage = time.longest_stage
    limit = time.limit(stage)
    place = topology.link_ends[limit.number].tolist() if limit.kind == "link" else limit.number
    whole = float(time.total.mean())
    part = float(time.stages[stage].mean()) / whole if whole else 0.0
    return LayerLimit(stage, limit.kind, None if limit.kind == "latency" else place, limit.seconds, part)


def layer_limits(time: LayerTime, topology: AbstractTopology) -> list[LayerLimit]:
    """The limit of every layer of times [layer, batch], as a mean over batches."""
    return [layer_limit(time.layer(row), topology) for row in range(len(time.total))]


def usual_limit(limits: Iterable[LayerLimit]) -> LayerLimit:
    """The limit of most layers, by stage and resource, where most of these have it; `part` is their mean."""
    limits = [*limits]
    ((stage, resource), _), *_ = Counter((each.stage, each.resource) for each in limits).most_common()
    same = [each for each in limits if (each.stage, each.resource) == (stage, resource)]
    (where, _), *_ = Counter(each.where for each in same).most_common()
    usual = next(each for each in same if each.where == where)
    return usual._replace(part=sum(each.part for each in same) / len(same))
