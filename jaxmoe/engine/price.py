"""The one place where stages become the time of a layer."""

from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import Usage
from jaxmoe.engine.schedule import AbstractSchedule
from jaxmoe.engine.stage import Priced, Stages
from jaxmoe.engine.times import HIDDEN, MOVEMENTS, LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.hardware.machine import added
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces.batches import Batch, micro_batches


def price(machine: Machine, schedule: AbstractSchedule, stages: Stages, reduction: AbstractReduction) -> LayerTime:
    """Time of a batch from its stages; micro-batches have equal parts of every stage that its `split` allows to cut."""
    many = schedule.micro_batches
    priced = [stage.priced(machine, reduction) for stage in stages]
    return _assembled(machine, schedule, [_evenly(each, many) for each in priced], reduction)


def price_alike(machine: Machine, schedule: AbstractSchedule, part: Stages, reduction: AbstractReduction) -> LayerTime:
    """Time of a batch in micro-batches that are alike, from the stages of one of them."""
    priced, many = [stage.priced(machine, reduction) for stage in part], schedule.micro_batches
    return _assembled(machine, schedule, [_times(each, many) for each in priced], reduction)


def price_in_turn(layers: Sequence[tuple[int, LayerTime]]) -> LayerTime:
    """Time of a step whose layers follow each other, from how many there are of each kind and the time of one."""
    many = [jax.tree.map(lambda leaf, count=count: count * leaf, time) for count, time in layers]
    blocks: dict[str, dict[str, None]] = {}
    for time in many:
        for block, names in time.blocks:
            blocks.setdefault(block, {}).update(dict.fromkeys(names))
    stages = dict.fromkeys(name for time in many for name in time.stages)
    return LayerTime(
        stages=added(time.stages for time in many),
        busy={name: added(time.busy.get(name, {}) for time in many) for name in stages},
        total=reduce(jnp.add, [time.total for time in many]),
        energy=added(time.energy for time in many),
        delay=added(time.delay for time in many),
        blocks=tuple((block, (*names,)) for block, names in blocks.items()),
        servers=tuple(dict.fromkeys(pair for time in many for pair in time.servers)),
    )


def price_parts(
    machine: Machine,
    schedule: AbstractSchedule,
    lower: Callable[[Batch], Stages],
    batch: Batch,
    whole: Stages,
    reduction: AbstractReduction,
) -> LayerTime:
    """Time of a batch that is cut into micro-batches.

    `lower` makes the stages of one micro-batch from its tokens; `whole` are stages that run once for the batch.
    """

    def part(tokens: Batch) -> list[Priced]:
        return [stage.priced(machine, reduction) for stage in lower(tokens)]

    many = schedule.micro_batches
    if many == 1:
        priced = jax.tree.map(lambda leaf: leaf[None], part(batch))
    else:
        priced = jax.vmap(part)(micro_batches(batch, many))
    once = [_evenly(stage.priced(machine, reduction), 1) for stage in whole]
    return _assembled(machine, schedule, [*priced, *once], reduction)


def _evenly(stage: Priced, many: int) -> Priced:
    """Splits a stage of a batch into `many` equal parts on a new leading axis."""
    return _times(jax.tree.map(lambda leaf: leaf / many, stage), many)


def _times(part: Priced, many: int) -> Priced:
    """A stage of `many` parts like this one, on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (many, *leaf.shape)), part)


def _assembled(
    machine: Machine, schedule: AbstractSchedule, stages: list[Priced], reduction: AbstractReduction
) -> LayerTime:
    """The time of a layer from its stages, leaves [part, ...]: usages of parts add up, the schedule has the total."""
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ValueError(f"stages are called {', '.join(names)}; give each a name of its own")
    summed = {stage.name: jax.tree.map(lambda leaf: leaf.sum(axis=0), stage.usage) for stage in stages}
    total = schedule.total([stage for stage in stages if stage.charge == "stage"], reduction)
    for stage in stages:
        seconds = summed[stage.name].seconds
        if stage.charge == "movement":
            total = total + seconds
        elif stage.charge == "background":
            total = jnp.maximum(jnp.maximum(total, _busiest_link(summed, reduction)), seconds)
    energy = added(usage.energy(machine) for usage in summed.values())
    if machine.energy is not None:
        energy |= machine.energy.of_time(total, machine.num_nodes)
    return LayerTime(
        stages={name: usage.seconds for name, usage in summed.items()},
        busy={name: usage.busy for name, usage in summed.items()},
        total=total,
        energy=energy,
        delay={name: usage.delay for name, usage in summed.items()},
        blocks=_blocks(stages),
        servers=_overlapping(stages) if schedule.overlaps else (),
    )


def _blocks(stages: list[Priced]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names of stages in their order, by block; movements are a block of their own."""
    names: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        block = {"stage": stage.block, "hidden": HIDDEN}.get(stage.charge, MOVEMENTS)
        names[block] = (*names.get(block, ()), stage.name)
    return tuple(names.items())


def _overlapping(stages: list[Priced]) -> tuple[tuple[str, str], ...]:
    """Stages of the layer that leave other servers free, each with its server."""
    return tuple((each.name, each.server) for each in stages if each.charge == "stage" and each.server != "machine")


def _busiest_link(usages: dict[str, Usage], reduction: AbstractReduction) -> Float[Array, ""]:
    """Seconds that the busiest link or port serves all stages and movements together."""
    serving = [usage.busy for usage in usages.values() if "link" in usage.busy]
    kinds = [[busy[kind] for busy in serving if kind in busy] for kind in ("link", "port")]
    return reduction(jnp.concatenate([reduce(jnp.add, each) for each in kinds if each]))
