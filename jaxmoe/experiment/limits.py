"""The resource that limits a layer, found outside `jit`: its stage, its kind, and its place in the machine."""

from collections import Counter
from typing import NamedTuple

import jax

from jaxmoe.engine import LayerTime
from jaxmoe.hardware import AbstractTopology


class LayerLimit(NamedTuple):
    """The longest stage of a layer and the resource that it waits for.

    `resource` is `link`, `port`, `pair`, `compute`, the name of a memory level, or `latency`; `place` are the ends of a
    link, or the number of a node, port or channel.
    """

    stage: str
    resource: str
    place: int | list[int] | None
    seconds: float

    @property
    def text(self) -> str:
        """The resource for people, with its stage where that is another word."""
        return self.resource if self.resource == self.stage else f"{self.resource} in {self.stage}"


def layer_limits(time: LayerTime, topology: AbstractTopology) -> list[LayerLimit]:
    """The limit of every layer of times [layer, batch], as a mean over batches."""
    found = []
    for row in range(len(time.total)):
        of_layer = jax.tree.map(lambda leaf, at=row: leaf[at], time)
        stage = of_layer.longest_stage
        limit = of_layer.limit(stage)
        place = topology.link_ends[limit.number].tolist() if limit.kind == "link" else limit.number
        found.append(LayerLimit(stage, limit.kind, None if limit.kind == "latency" else place, limit.seconds))
    return found


def usual_limit(limits: list[LayerLimit]) -> LayerLimit:
    """The limit of most layers, by stage and resource."""
    ((stage, resource), _), *_ = Counter((each.stage, each.resource) for each in limits).most_common()
    return next(each for each in limits if (each.stage, each.resource) == (stage, resource))
