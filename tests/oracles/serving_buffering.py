"""Requests that wait at a layer, in plain Python: Algorithm 2 of expert_streaming_fse_dp, one layer after another."""

from collections import Counter

import numpy as np
from jaxtyping import Float

from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.step_table import FEATURES
from oracles.serving_rank import Job, Rank


def pass_layers(rank: Rank, buffering: RequestBuffering) -> Float[np.ndarray, "layers F"]:
    """Numbers of each layer of a step. Jobs that are deferred have `paused` set to the layer where they wait."""
    going = [job for job in rank.running if job.given]
    starts, layers = {job: job.paused for job in going}, []
    for job in going:
        job.paused = None
    for layer in range(buffering.experts.shape[1]):
        attending = [job for job in going if starts[job] is None or layer > starts[job]]
        here = [job for job in going if starts[job] is None or layer >= starts[job]]
        chosen = {job: experts_of(job, buffering, layer) for job in here}
        counts = Counter(expert for experts in chosen.values() for expert in experts)
        for job in here:
            cold = any(counts[expert] < buffering.least_tokens for expert in chosen[job])
            if cold and job.decodes() and job.timer > 0:
                job.paused, job.timer, job.deferrals = layer, job.timer - 1, job.deferrals + 1
        passing = [job for job in here if job.paused is None]
        going = [job for job in going if job.paused is None]
        numbers = dict(zip(FEATURES, rank.features(attending), strict=True))
        numbers["all_tokens"] = numbers["most_tokens"] = numbers["tokens"]
        numbers["routed"] = sum(job.given for job in passing)
        numbers["loaded"] = len({expert for job in passing for expert in chosen[job]})
        layers.append(numbers)
    ends = sum(job.given == job.left() for job in going)
    return np.array([[*(numbers | {"sequences": ends}).values()] for numbers in layers], float)


def experts_of(job: Job, buffering: RequestBuffering, layer: int) -> list[int]:
    """Experts of all tokens that a job has in the step, as often as they are chosen."""
    positions = (buffering.first[job.row] + job.computed + np.arange(job.given)) % len(buffering.experts)
    return [expert for expert in buffering.experts[positions, layer].ravel().tolist() if expert >= 0]


def earn(job: Job, buffering: RequestBuffering) -> None:
    """A token of output more: after so many of them a job may wait once more."""
    job.passes += 1
    if buffering.passes and job.passes >= buffering.passes:
        job.passes, job.timer = 0, job.timer + 1
