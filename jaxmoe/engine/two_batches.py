"""Two micro-batches that take turns through all layers: one's exchange runs beside the other's compute.

Each server has one queue, in the order in which an engine launches: a run of stages for the first micro-batch, then
for the second. With runs c1, n1, c2, n2, ... of nodes and network in turn, n1 of the first and c1 of the second begin
together, when c1 of the first has ended; c2 of the first and n1 of the second begin when both of these have ended; and
so on. So time is a sum of windows, each as long as an exchange or what is computed beside it, whichever is longer:

    c1 + max(n1, c1) + max(n1, c2) + max(n2, c2) + max(n2, c3) + ... + n_last

Exchanges that take processors of nodes add these seconds to what is computed in their window.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.schedule import AbstractSchedule, ScheduleError, Seconds, node_seconds
from jaxmoe.engine.stage import Priced
from jaxmoe.relax import AbstractReduction


class Runs(NamedTuple):
    """Seconds of runs of stages for each of two micro-batches: a run of nodes, then the network's after it."""

    nodes: Float[Array, "2 run"]
    network: Float[Array, "2 run"]
    held: Float[Array, "2 run"]  # of nodes, by the network's


class TwoBatches(AbstractSchedule):
    """Two micro-batches of all blocks in turn. Stages need a server of their own, `nodes` or `network`."""

    @property
    def micro_batches(self) -> int:
        return 2

    @property
    def overlaps(self) -> bool:
        return True

    def total(self, stages: Iterable[Priced], reduction: AbstractReduction) -> Seconds:
        return self.of_block([*stages], reduction)

    def of_block(self, stages, reduction):
        """Raises `ScheduleError` for stages that need the whole machine, or cannot be cut."""
        blocks: dict[str, list[Priced]] = {}
        for stage in stages:
            if stage.server == "machine" or stage.split == "whole":
                raise ScheduleError(
                    f"two batches take turns on nodes and network, but the stage {stage.name} needs both or is of "
                    "whole batches; use serial"
                )
            blocks.setdefault(stage.block, []).append(stage)
        nodes, network, held = (
            jnp.concatenate(each, axis=1) for each in zip(*map(_runs, blocks.values()), strict=True)
        )
        same = jnp.stack([network[0], nodes[1] + held[0]], axis=-1)
        after = jnp.stack([network[1, :-1], nodes[0, 1:] + held[1, :-1]], axis=-1)
        return nodes[0, 0] + reduction(same).sum() + reduction(after).sum() + network[1, -1]


def _runs(stages: list[Priced]) -> Runs:
    """The runs of all layers of a block in their order."""
    found: list[list[Array]] = []
    server = "network"
    for stage in stages:
        nothing = jnp.zeros_like(stage.usage.seconds)
        if (stage.server == "nodes" and server == "network") or not found:
            found.append([nothing] * 3)
        server = stage.server
        seconds, taken = stage.usage.seconds / stage.repeat, node_seconds(stage) / stage.repeat
        add = [seconds, nothing, nothing] if server == "nodes" else [nothing, seconds, taken]
        found[-1] = [one + other for one, other in zip(found[-1], add, strict=True)]
    return Runs(*(jnp.tile(jnp.stack(each, axis=1), stages[0].repeat) for each in zip(*found, strict=True)))
