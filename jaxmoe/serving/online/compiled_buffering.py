"""Layers of a step one by one, compiled, where requests may wait at one: as `RequestBuffering` says."""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.compiled_rank import DECODING, READ, READ_CONTEXT, SEQUENCES, decodes
from jaxmoe.serving.online.kv_blocks import COMPUTED, DEFERRED, GIVEN, NONE, PASSES, PAUSED, TIMER
from jaxmoe.serving.online.packed_table import step_seconds
from jaxmoe.serving.online.step_table import FEATURES

LEAST, OFTEN = range(2)  # of the rules
FROM, GOES = range(2)  # columns of a seat: the layer at whose experts its pass begins, and whether it is not deferred


class Routing(NamedTuple):
    """Choices of tokens, rules of waiting, and room to work in; empty where nobody waits."""

    experts: Int[np.ndarray, "tokens layers top_k"]
    first: Int[np.ndarray, " R"]
    rules: Int[np.ndarray, "2"]
    counts: Int[np.ndarray, " experts"]  # tokens of each expert in a layer
    seats: Int[np.ndarray, "seats 2"]
    features: Float[np.ndarray, "layers 1 F"]


def routing_of(buffering: RequestBuffering | None, seats: int) -> Routing:
    """Arrays for engines of so many seats."""
    if buffering is None:
        none = np.zeros(0, np.int64)
        return Routing(np.zeros((0, 0, 0), np.int16), none, none, none, np.zeros((0, 2), np.int64), np.zeros((0, 1, 0)))
    return Routing(
        np.ascontiguousarray(buffering.experts, np.int16),
        np.asarray(buffering.first, np.int64),
        np.array([buffering.least_tokens, buffering.passes]),
        np.zeros(buffering.num_experts, np.int64),
        np.zeros((seats, 2), np.int64),
        np.zeros((buffering.experts.shape[1], 1, len(FEATURES))),
    )


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def earn(jobs, routing, row):
    """Count a token of output, after so many of which a request may wait once more."""
    jobs[row, PASSES] += 1
    if 0 < routing.rules[OFTEN] <= jobs[row, PASSES]:
        jobs[row, PASSES] = 0
        jobs[row, TIMER] += 1


@njit(cache=True, nogil=True)
@no_type_check
def pass_layers(queues, memory, tables, routing, rank, table):
    """Take the tokens of a step through all layers; some requests are paused at one. Returns its seconds."""
    jobs, seats, sums = memory.jobs, queues.seats, queues.sums[rank]
    layers, running = routing.experts.shape[1], queues.running[rank]
    for at in range(running):
        row = seats[rank, at]
        routing.seats[at, GOES] = row >= 0 and jobs[row, GIVEN] > 0
        routing.seats[at, FROM] = jobs[row, PAUSED] if row >= 0 else NONE
    for layer in range(layers):
        _attend(queues, memory, routing, rank, layer)
        _count(queues, memory, routing, rank, layer)
        _defer(queues, memory, routing, rank, layer)
        _pass(queues, memory, routing, rank, layer)
    for at in range(running):
        row = seats[rank, at]
        if routing.seats[at, GOES]:
            jobs[row, PAUSED] = NONE
        elif row >= 0 and jobs[row, GIVEN] > 0:
            sums[DECODING] -= 1
            sums[SEQUENCES] -= 1
    seconds = 0.0
    for layer in range(layers):
        row = routing.features[layer, 0]
        row[1] = sums[SEQUENCES]
        if row[0] > 0 or row[1] > 0 or row[9] > 0:  # none is there before the layer at which all go on
            seconds += step_seconds(tables, table, routing.features[layer], False)
    return seconds / layers


@njit(cache=True, nogil=True)
@no_type_check
def _attend(queues, memory, routing, rank, layer):
    """Numbers of the attention of a layer: of all who come to it, not of those who waited there."""
    jobs, sums, decoding, context, longest = memory.jobs, queues.sums[rank], 0, 0, 0
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if routing.seats[at, GOES] and routing.seats[at, FROM] < layer and decodes(jobs, row):
            decoding += 1
            context += jobs[row, COMPUTED]
            longest = max(longest, jobs[row, COMPUTED])
    numbers, tokens = routing.features[layer, 0], sums[READ] + decoding
    numbers[0], numbers[2], numbers[4], numbers[6] = tokens, sums[READ], decoding, longest
    numbers[3] = sums[READ_CONTEXT] / max(sums[READ], 1)
    numbers[5] = context / max(decoding, 1)
    numbers[7] = numbers[8] = tokens


@njit(cache=True, nogil=True)
@no_type_check
def _token(memory, routing, row, number):
    """Where the trace has a token of the step."""
    return (routing.first[row] + memory.jobs[row, COMPUTED] + number) % len(routing.experts)


@njit(cache=True, nogil=True)
@no_type_check
def _count(queues, memory, routing, rank, layer):
    """Tokens of each expert, of all who are at a layer."""
    routing.counts[:] = 0
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if not routing.seats[at, GOES] or routing.seats[at, FROM] > layer:
            continue
        for number in range(memory.jobs[row, GIVEN]):
            for expert in routing.experts[_token(memory, routing, row, number), layer]:
                if expert >= 0:
                    routing.counts[expert] += 1


@njit(cache=True, nogil=True)
@no_type_check
def _defer(queues, memory, routing, rank, layer):
    """Pause who has a wait left and an expert with few tokens. All decide on the same counts."""
    jobs = memory.jobs
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if not routing.seats[at, GOES] or routing.seats[at, FROM] > layer:
            continue
        if jobs[row, TIMER] == 0 or not decodes(jobs, row):
            continue
        for expert in routing.experts[_token(memory, routing, row, 0), layer]:
            if expert >= 0 and routing.counts[expert] < routing.rules[LEAST]:
                routing.seats[at, GOES] = 0
                jobs[row, PAUSED] = layer
                jobs[row, TIMER] -= 1
                jobs[row, DEFERRED] += 1
                break


@njit(cache=True, nogil=True)
@no_type_check
def _pass(queues, memory, routing, rank, layer):
    """Numbers of the experts of a layer: of all who pass it."""
    _count(queues, memory, routing, rank, layer)
    routed, loaded = 0, 0
    for at in range(queues.running[rank]):
        if routing.seats[at, GOES] and routing.seats[at, FROM] <= layer:
            routed += memory.jobs[queues.seats[rank, at], GIVEN]
    for count in routing.counts:
        loaded += count > 0
    routing.features[layer, 0, 9], routing.features[layer, 0, 10] = routed, loaded
