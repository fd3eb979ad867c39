"""How the stages of a layer follow each other: stages with their seconds become the time of the layer.

- `Serial`: every stage begins when those before it have ended, t = t_comp + 2 t_comm (hd_moe Eq. 12). Stages with the
  same ones before them run side by side.
- `Overlap`: network and nodes of a block serve different work at once, so the longer of them counts: the limit of many
  micro-batches, or of two batches that take turns.
- `Pipelined`: the batch in `m` micro-batches of successive tokens. The network serves one stage at a time, in the
  order dispatch 1, dispatch 2, combine 1, dispatch 3, combine 2, ...; a micro-batch computes when it is dispatched
  and the one before has computed.
- `IdleLinks`: stages as in `Serial`, while movements in the background use what they leave idle of every link: the
  layer takes longer only where a link has no idle time left. In the other rules a movement comes before the stages.
- `TwoBatches`: two micro-batches that take turns through all layers, one's exchange beside the other's compute.

Blocks, such as attention and experts, follow each other.
"""

import abc
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import Server
from jaxmoe.engine.stage import Priced
from jaxmoe.engine.times import NODE
from jaxmoe.errors import InputError
from jaxmoe.relax import AbstractReduction

Seconds = Float[Array, ""]
Parts = Float[Array, " part"]


class ScheduleError(InputError):
    """A schedule that is not known, or that means nothing for a stage, with the remedy."""


class AbstractSchedule(eqx.Module):
    """Combines stages. `micro_batches` is into how many parts a batch is cut, each with stages of its own."""

    @property
    def micro_batches(self) -> int:
        return 1

    @property
    def in_background(self) -> bool:
        """Whether movements run beside the stages."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether network and nodes serve stages of a block at once."""
        return False

    def total(self, stages: Iterable[Priced], reduction: AbstractReduction) -> Seconds:
        """Time of all parts of a batch, s, from its stages, leaves [part]: block after block."""
        blocks: dict[str, list[Priced]] = {}
        for stage in stages:
            blocks.setdefault(stage.block, []).append(stage)
        return reduce(jnp.add, [self.of_block(each, reduction) for each in blocks.values()])

    @abc.abstractmethod
    def of_block(self, stages: list[Priced], reduction: AbstractReduction) -> Seconds:
        """Time of the stages of one block, s."""


class Serial(AbstractSchedule):
    """Runs every stage once all stages in its `before` have ended."""

    def of_block(self, stages, reduction):
        ends: dict[str, Seconds] = {}
        for stage in stages:
            begin = [ends[name] for name in stage.before if name in ends]
            ends[stage.name] = reduce(jnp.add, _held(stage, stages), _last(begin, reduction)) + _seconds(stage)
        awaited = {name for stage in stages for name in stage.before}
        return _last([end for name, end in ends.items() if name not in awaited], reduction)


def _seconds(stage: Priced) -> Seconds:
    return stage.usage.seconds.sum()


def _held(stage: Priced, stages: list[Priced]) -> list[Seconds]:
    """Seconds of nodes that exchanges take which run beside a stage of nodes, s."""
    if stage.server != "nodes":
        return []
    beside = [each for each in stages if each.server == "network" and each.before == stage.before]
    return [node_seconds(each).sum() for each in beside if NODE in each.usage.busy]


def node_seconds(stage: Priced) -> Float[Array, "..."]:
    """Seconds of the busiest node in a stage; 0 for traffic that takes none of it."""
    busy = stage.usage.busy.get(NODE)
    return jnp.zeros_like(stage.usage.seconds) if busy is None else busy.max(axis=-1)


def _last(ends: list[Seconds], reduction: AbstractReduction) -> Seconds | float:
    """The latest of the end times, s; 0 if there are none."""
    if len(ends) > 1:
        return reduction(jnp.stack(ends))
    return ends[0] if ends else 0.0


class Overlap(AbstractSchedule):
    """Overlaps compute with communication: the longer of the two sums counts. Stages that need network and nodes
    together (`machine`) overlap with nothing and are added. What an exchange takes of nodes counts as compute."""

    @property
    def overlaps(self) -> bool:
        return True

    def of_block(self, stages, reduction):
        def served(server: Server) -> list[Seconds]:
            return [_seconds(stage) for stage in stages if stage.server == server]

        held = [node_seconds(each).sum() for each in stages if each.server == "network" and NODE in each.usage.busy]
        sums = [reduce(jnp.add, each) for each in (served("network"), [*served("nodes"), *held]) if each]
        beside = [_last(sums, reduction)] if sums else []
        return reduce(jnp.add, [*served("machine"), *beside])


class Pipelined(AbstractSchedule):
    """Micro-batches in a pipeline of network and nodes."""

    parts: int = eqx.field(static=True, default=2)

    @property
    def micro_batches(self) -> int:
        return self.parts

    @property
    def overlaps(self) -> bool:
        return self.parts > 1

    def total(self, stages, reduction):
        """Raises `ScheduleError` for stages that cannot be cut into parts."""
        stages = [*stages]
        for stage in sorted(stages, key=lambda each: each.split != "whole"):
            if stage.server == "machine" or stage.split == "whole":
                raise ScheduleError(
                    f"schedule is 'pipelined({self.parts})', which cuts a batch into parts, but the stage {stage.name} "
                    "is of whole batches; use serial or overlap"
                )
        return super().total(stages, reduction)

    def of_block(self, stages, reduction):
        before, node, after = _around_nodes(stages, f"pipelined({self.parts})")
        network = free = jnp.zeros(())
        computed: list[Seconds] = []
        for part in range(self.parts):
            network = network + before[part]
            free = jnp.maximum(free, network) + node[part]
            computed.append(free)
            if part:
                network = jnp.maximum(network, computed[part - 1]) + after[part - 1]
        return jnp.maximum(network, computed[-1]) + after[-1]


def _around_nodes(stages: list[Priced], schedule: str) -> tuple[Parts, Parts, Parts]:
    """Seconds of the network before nodes compute, of the nodes, and of the network after.

    Raises `ScheduleError` for stages that are not of this form.
    """
    at = [place for place, stage in enumerate(stages) if stage.server == "nodes"]
    chain = all(stage.before[-1:] == (other.name,) for other, stage in pairwise(stages))
    if len(at) != 1 or not chain:
        names = ", ".join(stage.name for stage in stages)
        raise ScheduleError(
            f"schedule is {schedule!r}, which takes stages of the network before and after one of nodes, not {names}; "
            "use serial or overlap"
        )
    seconds = [stage.usage.seconds for stage in stages]
    nothing = jnp.zeros_like(seconds[at[0]])
    first, last = (reduce(jnp.add, some) if some else nothing for some in (seconds[: at[0]], seconds[at[0] + 1 :]))
    return first, seconds[at[0]], last


class IdleLinks(AbstractSchedule):
    """Stages as in `Serial`; movements in the background."""

    @property
    def in_background(self) -> bool:
        return True

    def of_block(self, stages, reduction):
        return Serial().of_block(stages, reduction)


SCHEDULES = ("serial", "overlap", "pipelined(m)", "idle_links")


def schedule_of(name: str) -> AbstractSchedule:
    """The schedule of this name; `pipelined(4)` has four micro-batches. Raises `ScheduleError`."""
    plain: Mapping[str, AbstractSchedule] = {"serial": Serial(), "overlap": Overlap(), "idle_links": IdleLinks()}
    if name in plain:
        return plain[name]
    if found := re.fullmatch(r"pipelined\(([1-9]\d*)\)", name):
        return Pipelined(int(found[1]))
    raise ScheduleError(f"schedule is {name!r}, expected one of {', '.join(SCHEDULES)}, with a number for m")


class Runs(NamedTuple):
    """Seconds of runs of stages for each of two micro-batches: a run of nodes, then the network's after it."""

    nodes: Float[Array, "2 run"]
    network: Float[Array, "2 run"]
    held: Float[Array, "2 run"]  # of nodes, by the network's


class TwoBatches(AbstractSchedule):
    """Two micro-batches of all blocks in turn. Stages need a server of their own, `nodes` or `network`.

    Each server has one queue, in the order in which an engine launches: a run of stages for the first micro-batch, then
    for the second. With runs c1, n1, c2, n2, ... of nodes and network in turn, n1 of the first and c1 of the second
    begin together, when c1 of the first has ended; c2 of the first and n1 of the second begin when both of these have
    ended; and so on. So time is a sum of windows, each as long as an exchange or what is computed beside it, whichever
    is longer:

        c1 + max(n1, c1) + max(n1, c2) + max(n2, c2) + max(n2, c3) + ... + n_last

    Exchanges that take processors of nodes add these seconds to what is computed in their window.
    """

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
