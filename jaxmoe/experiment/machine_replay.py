"""A deployed step on a machine as the simulator replays it: the layers of its system, and what all nodes share beside.

Layers follow each other, so a step is as long as all of them. Each is replayed message by message as its system decided
it, at a few places: as many layers and iterations as are asked for, evenly taken. Their mean is that of all layers.
"""

from functools import cache

import numpy as np

from jaxmoe.config import Scenario
from jaxmoe.des.description import even_seconds
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.machine_deployment import deployed_plan, runs_of_size
from jaxmoe.experiment.simulation import batch_at
from jaxmoe.experiment.step_replay import replay_of
from jaxmoe.serving.machine_step import Context, MachineStep, attends, context_of
from jaxmoe.serving.step import AbstractStep, ModelStep, StepLoad

REPLAYS = 4  # layers and iterations of a pass


def replayed_step(scenario: Scenario, step: AbstractStep, load: StepLoad) -> float:
    """Seconds of a step of a scenario's deployment in the simulator, on any machine; `load` has no axes."""
    if isinstance(step, MachineStep):
        return replayed_on_machine(scenario, step, load)
    assert isinstance(step, ModelStep)
    return replay_of(step, load).seconds


def replayed_on_machine(scenario: Scenario, step: MachineStep, load: StepLoad, replays: int = REPLAYS) -> float:
    """Seconds of a step of a scenario's deployment in the simulator; numbers of `load` are of no axes.

    Where fewer layers and iterations are replayed than the model times, the mean of these is scaled by what the model
    tells of all over these. What a system does not replay, such as migrations on idle links, is taken over.
    """
    inputs = inputs_of(scenario)
    strategy = deployed_plan(inputs)
    described = describe(inputs, "sharded", scenario.costs.exchange)

    @cache
    def layer_seconds(tokens: int, context: Context) -> float:
        runs, iterations = runs_of_size(inputs, strategy, tokens, context)
        run = runs[step.layers.name]
        rolled = run.rollout(iterations.batches)
        compared = np.asarray(rolled.compared, float)
        places = np.unique(np.linspace(0, compared.size - 1, replays).round().astype(int))
        told = replayed = 0.0
        for at, row in zip(*np.unravel_index(places, compared.shape), strict=True):
            replayed += run.replay(rolled, batch_at(iterations, int(row), int(at)), int(at), int(row))
            told += compared[at, row]
        left = float(np.mean(np.asarray(rolled.time.total, float) - compared))
        return float(compared.mean()) * replayed / told + left

    seconds = 0.0
    for each in step.passes(load):
        context = context_of(step.model, each.load)
        timed = attends(step.layers.time(each.tokens, context))
        beside = sum(
            even_seconds(
                described,
                float(part.flops_per_token) * tokens,
                float(part.weight_bytes) + float(part.bytes_per_token) * tokens,
            )
            for part, tokens in step.parts_beside(each, timed).values()
        )
        seconds += each.times * (each.routed * layer_seconds(each.tokens, context) + beside)
    return seconds
