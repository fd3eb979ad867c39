"""A deployed step as the simulator replays it: every launch of every layer and micro-batch, and what it waits for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from jaxmoe.des import StepLaunch, StepReplay, replay_step
from jaxmoe.engine import Launch, Priced, Stage
from jaxmoe.engine.stage import Stages
from jaxmoe.serving.step import ModelStep, StepLoad


def replay_of(step: ModelStep, batch: StepLoad) -> StepReplay:
    """The replay of one step; numbers of `batch` are of no axes.

    Taken over are the seconds of each kernel and exchange alone, and which wait for which.
    """
    many = step.schedule.micro_batches
    load = StepLoad(*(jnp.asarray(number, jnp.float32) for number in batch)).part(many)
    stages = step.lower(load)
    return replay_step(_in_turns([*_of_layers(stages)], _block_starts(stages), many))


def _block_starts(stages: Stages) -> list[int]:
    """Places of the first launches of blocks among those of all layers."""
    sizes = Counter(stage.block for stage in stages for _ in range(stage.repeat))
    return [0, *np.cumsum([*sizes.values()]).tolist()][:-1]


def _of_layers(stages: Stages) -> Iterator[StepLaunch]:
    """Launches of one micro-batch through all layers; a layer waits for what ends the one before."""
    count = 0
    ends: tuple[int, ...] = ()
    for block in dict.fromkeys(stage.block for stage in stages):
        own = [stage for stage in stages if stage.block == block]
        for layer in range(own[0].repeat):
            place = {stage.name: count + at for at, stage in enumerate(own)}
            for stage in own:
                after = tuple(place[name] for name in stage.before) or ends
                yield _launch(stage, f"{stage.name} {layer}", after)
            awaited = {name for stage in own for name in stage.before}
            ends = tuple(at for name, at in place.items() if name not in awaited)
            count += len(own)


def _launch(stage: Stage | Priced, name: str, after: tuple[int, ...]) -> StepLaunch:
    assert isinstance(stage, Stage)
    demand = stage.demand
    assert isinstance(demand, Launch)
    held = 0.0 if demand.held is None else float(demand.held)
    return StepLaunch(name, "network" if demand.on == "network" else "nodes", float(demand.seconds), after, held)


def _in_turns(chain: list[StepLaunch], starts: list[int], many: int) -> list[StepLaunch]:
    """The launches of micro-batches that are alike: each goes on to the end of an exchange, then the next does.

    So it is where a block of layers `starts`: the head has to tell the tokens before drafts of more begin.
    """
    queues = [each.queue for each in chain]
    cuts = {at for at, pair in enumerate(pairwise(queues), 1) if pair == ("network", "nodes")}
    ordered = [
        (part, at)
        for first, last in pairwise(sorted({*starts, *cuts, len(chain)}))
        for part in range(many)
        for at in range(first, last)
    ]
    number = {key: count for count, key in enumerate(ordered)}
    return [
        replace(chain[at], after=tuple(number[part, earlier] for earlier in chain[at].after)) for part, at in ordered
    ]
