"""Time to first token and per token of users who send their next request when the last is answered.

A backend keeps as many sequences as have a seat and fit into memory. In the long run a prompt is read for every output
that ends, so every token of an output waits for the parts of the others' prompts that are read meanwhile.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.serving.deployment import Count
from jaxmoe.serving.kernels import Given
from jaxmoe.serving.memory import DeviceMemory
from jaxmoe.serving.step import AbstractStep, StepLoad

Seconds = Float[Array, "..."]


class Backend(NamedTuple):
    """How a backend batches: `chunk` tokens of prompts a step at most, beside the decoding sequences if it `mixes`.

    With `divides`, the data-parallel ranks have equal parts of a chunk, else a chunk each.
    """

    chunk: float
    mixes: bool
    seats: float  # sequences at a time of a data-parallel rank
    memory_part: float  # of a GPU's memory
    divides: bool = False

    def chunk_of_rank(self, ranks: Count) -> Given:
        """Tokens of prompts that one of so many data-parallel ranks reads a step at most."""
        return float(self.chunk) / (ranks if self.divides else 1)


# Defaults of the engines' own documentation, or what their public benchmarks set.
BACKENDS = {
    "vllm": Backend(chunk=8192, mixes=True, seats=1024, memory_part=0.9),
    "sglang": Backend(chunk=8192, mixes=False, seats=1024, memory_part=0.88, divides=True),
    "trtllm": Backend(chunk=8192, mixes=True, seats=2048, memory_part=0.9),
}


LIMITS = ("the users in flight", "memory of keys and values", "the engine's seats")  # of what decodes at a time


class Overheads(NamedTuple):
    """Three constants of a backend, for all that kernels do not tell. As here by default, nothing is added."""

    step: Given = 0.0  # s of a step beside its kernels
    prompts: Given = 1.0  # times the kernels that read prompts
    request: Given = 0.0  # s of a request before its first step


# Fitted to measured systems by `study.py fit` of studies/silicon, which tells what they are worth on others.
OVERHEADS = {
    "vllm": Overheads(step=0.54e-3, prompts=1.47, request=33e-3),
    "sglang": Overheads(step=0.50e-3, prompts=2.30, request=57e-3),
    "trtllm": Overheads(step=0.50e-3, prompts=1.76, request=61e-3),
}


class Users(NamedTuple):
    """Requests in flight, `concurrency`; tokens of a prompt and of an output on average; requests of each user.

    All start at once, so the first prompts wait for each other. A drafted token is right with probability `acceptance`
    where those before it are.
    """

    concurrency: Given
    prompt: Given
    output: Given
    requests: Given = 10.0
    acceptance: Given = 0.0


class MeanWaits(NamedTuple):
    """Means over requests: seconds to the first token and between tokens, and sequences decoding on a rank."""

    first_token: Seconds
    per_token: Seconds
    decoding: Seconds

    def tokens_per_s_user(self) -> Seconds:
        """Output tokens of one user, 1/s, once the first is there."""
        return 1 / self.per_token

    def tokens_per_s_device(self, step: AbstractStep) -> Seconds:
        """Output tokens of a GPU, 1/s."""
        return self.decoding * step.deployment.data / self.per_token / step.deployment.devices


class Loop(NamedTuple):
    """Requests of a rank in the long run before constants: numbers of one common shape.

    `step` are the seconds of kernels of a step that only decodes, `read` those that one chunk of a prompt adds to it
    or, where a backend does not mix, takes alone; a prompt has `chunks`. `waiting` requests have no seat for each one
    that has, and a user has `requests`. A step gives a sequence so many `tokens`.
    """

    decoding: Given
    output: Given
    chunks: Given
    step: Seconds
    read: Seconds
    waiting: Given
    mixes: Given | bool
    requests: Given
    tokens: Given = 1.0


class StepLoads(NamedTuple):
    """Steps of a rank in the long run: one that decodes `alone`, and one that is `reading` a chunk of a prompt.

    Where a backend mixes, that one decodes as well. A prompt has so many `chunks`.
    """

    alone: StepLoad
    reading: StepLoad
    chunks: Given


def step_loads(step: AbstractStep, users: Users, sequences: Given, backend: Backend) -> StepLoads:
    """The steps of users whose rank has memory for so many `sequences`."""
    on_rank = jnp.asarray(users.concurrency) / step.deployment.data
    decoding = jnp.minimum(jnp.minimum(on_rank, sequences), backend.seats)
    prompt, output = jnp.asarray(users.prompt), jnp.asarray(users.output)
    context, chunk = prompt + output / 2, jnp.minimum(backend.chunk_of_rank(step.deployment.data), prompt)
    beside, queries = decoding if backend.mixes else jnp.zeros_like(decoding), step.deployment.queries
    alone = StepLoad(decoding, context, queries=queries)
    return StepLoads(alone, StepLoad(beside, context, chunk, prompt, queries), prompt / chunk)


def tokens_of_step(drafted: int, acceptance: Given) -> Given:
    """Tokens that a sequence gets in a step on average: its own, and drafted ones up to the first that is wrong."""
    return sum((acceptance**count for count in range(1, drafted + 1)), 1.0)


def loop_of(step: AbstractStep, users: Users, sequences: Given, backend: Backend) -> Loop:
    """The loop of users whose rank has memory for so many `sequences`."""
    loads = step_loads(step, users, sequences, backend)
    alone, read = step.seconds(loads.alone), step.seconds(loads.reading)
    decoding, on_rank = loads.alone.decoding, jnp.asarray(users.concurrency) / step.deployment.data
    return Loop(
        decoding=decoding,
        output=jnp.asarray(users.output),
        chunks=loads.chunks,
        step=alone,
        read=read - alone if backend.mixes else read,
        waiting=jnp.maximum(on_rank / decoding - 1, 0.0),
        mixes=jnp.asarray(backend.mixes),
        requests=users.requests,
        tokens=tokens_of_step(step.deployment.drafted, jnp.asarray(users.acceptance)),
    )


def wait(loop: Loop, overheads: Overheads) -> MeanWaits:
    """Waiting times of a loop with the constants of a backend."""
    own = loop.step + overheads.step
    reading = loop.chunks * (loop.read * overheads.prompts + jnp.where(loop.mixes, own, overheads.step))
    added = jnp.where(loop.mixes, reading - loop.chunks * own, reading)  # to the steps of the others
    others = jnp.maximum(loop.decoding - 1, 0.0)
    per_token = own / loop.tokens + others * added / loop.output
    # Arrivals are taken as random: a queue with one server (M/D/1), whose busy time is that of the others' prompts.
    busy = others * added / loop.output / per_token
    queue = busy / (2 * (1 - busy)) * reading + own / 2
    burst = others / 2 * added / loop.requests
    seat = loop.waiting * loop.output * per_token
    return MeanWaits(overheads.request + reading + queue + burst + seat, per_token, loop.decoding)


def limits(decoding: Given, on_rank: Given, backend: Backend) -> Int[np.ndarray, "..."]:
    """Which of `LIMITS` says how many of the sequences `on_rank` decode at a time."""
    decoding, all_decode = np.asarray(decoding), np.asarray(decoding) >= np.asarray(on_rank) * (1 - 1e-6)
    return np.where(all_decode, 0, np.where(decoding < backend.seats, 1, 2))


def serve(step: AbstractStep, users: Users, memory: DeviceMemory, backend: Backend, overheads: Overheads) -> MeanWaits:
    """Waiting times of users, of any common shape."""
    return wait(loop_of(step, users, memory.sequences, backend), overheads)
