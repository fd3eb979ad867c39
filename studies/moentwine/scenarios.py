"""Scenarios whose mixture drifts: the scenario of every request as it arrived, and what iterations serve meanwhile.

Production serves scenarios (chat, coding, mathematics, ...) whose parts change slowly and come round again (moentwine
V-B, VI-C). Here a scenario is a topic of a fitted process or of a preset. Requests arrive as recorded; each belongs to
a scenario drawn from the mixture of its moment; and an iteration serves the tokens of the requests that are then in the
system.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.traces import TraceError
from jaxmoe.traces.synthesis import Arrivals, GatingProcess, sample_trace
from jaxmoe.traces.trace import tally

Phase = Literal["prefill", "decode", "hybrid"]


def merged_arrivals(parts: Sequence[Arrivals]) -> Arrivals:
    """The requests of several services in one order of time."""
    order = np.argsort(np.concatenate([part.seconds for part in parts]), kind="stable")
    fields = ("seconds", "prompt", "answer")
    return Arrivals(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in fields))


def cyclic_mixture(
    moment: Float[np.ndarray, "*moments"], scenarios: int, cycles: float = 1.0, sharpness: float = 2.0
) -> Float[np.ndarray, "*moments scenario"]:
    """Parts of the scenarios at moments from 0 to 1: each has its turn in every cycle.

    A scenario's part goes as exp(sharpness x cosine of how far its turn is); 0 makes all parts equal at all times.
    """
    turn = 2 * np.pi * (cycles * np.asarray(moment)[..., None] - np.arange(scenarios) / scenarios)
    weight = np.exp(sharpness * np.cos(turn))
    return weight / weight.sum(axis=-1, keepdims=True)


def scenario_of_requests(
    arrivals: Arrivals, scenarios: int, cycles: float, seed: int, sharpness: float = 2.0
) -> Int[np.ndarray, " request"]:
    """The scenario of every request, drawn from the mixture when it arrives."""
    span = max(float(arrivals.seconds[-1]), 1e-9)
    parts = cyclic_mixture(arrivals.seconds / span, scenarios, cycles, sharpness)
    drawn = np.random.default_rng((seed, 1)).random(len(parts))
    return (drawn[:, None] > np.cumsum(parts, axis=1)[:, :-1]).sum(axis=1)


# What iterations serve.


def iteration_mixture(
    arrivals: Arrivals, scenario: Int[np.ndarray, " request"], phase: Phase, iterations: int, tokens: int
) -> Float[np.ndarray, "iteration scenario"]:
    """The part of each scenario in the `tokens` of every iteration, of a service that always has requests waiting.

    `prefill` takes prompts one after the other, as many tokens as go into an iteration. `decode` has `tokens` places;
    a request keeps one for as many iterations as its answer has tokens, and the next one waiting follows. `hybrid`
    gives half of an iteration to each. Requests are dealt again from the first when all are done.
    """
    if min(iterations, tokens) < 1:
        raise TraceError(f"{iterations} iterations of {tokens} tokens; expected at least one of each")
    scenarios = int(scenario.max()) + 1
    if phase == "prefill":
        served = _prefilled(arrivals.prompt, scenario, scenarios, iterations, tokens)
    elif phase == "decode":
        served = _decoded(arrivals.answer, scenario, scenarios, iterations, tokens)
    else:
        half = (scenario, scenarios, iterations, max(tokens // 2, 1))
        served = _prefilled(arrivals.prompt, *half) + _decoded(arrivals.answer, *half)
    return served / served.sum(axis=1, keepdims=True)


def _prefilled(
    length: Int[np.ndarray, " request"], scenario: np.ndarray, scenarios: int, iterations: int, tokens: int
) -> Float[np.ndarray, "iteration scenario"]:
    """Tokens of each scenario in every iteration, prompts one after the other."""
    needed = iterations * tokens
    rounds = -(-needed // max(int(length.sum()), 1))
    ends = np.cumsum(np.tile(length.astype(np.int64), rounds))
    # Tokens of a scenario up to any token, read off at the ends of iterations.
    cuts = np.arange(iterations + 1) * tokens
    served = np.zeros((iterations, scenarios))
    owner = np.tile(scenario, rounds)
    for index in range(scenarios):
        own = np.cumsum(np.where(owner == index, np.diff(ends, prepend=0), 0))
        served[:, index] = np.diff(np.interp(cuts, np.r_[0, ends], np.r_[0, own]))
    return served


def _decoded(
    length: Int[np.ndarray, " request"], scenario: np.ndarray, scenarios: int, iterations: int, places: int
) -> Float[np.ndarray, "iteration scenario"]:
    """Requests of each scenario in every iteration; the first ones are met at some point of their answer."""
    change = np.zeros((iterations + 1, scenarios))
    begins = [-(place % max(int(length[place % len(length)]), 1)) for place in range(places)]
    free: list[int] = []  # when each place is free again
    request = 0
    while request < places or free[0] < iterations:
        begin = begins[request] if request < places else heapq.heappop(free)
        card = request % len(length)
        end = begin + max(int(length[card]), 1)
        change[max(begin, 0), scenario[card]] += 1
        change[min(end, iterations), scenario[card]] -= 1
        heapq.heappush(free, end)
        request += 1
    return np.cumsum(change, axis=0)[:iterations]


# How often experts are chosen under each scenario, and counts of iterations.


def scenario_shares(
    process: GatingProcess, topics: Sequence[int], tokens: int, seed: int
) -> Float[np.ndarray, "scenario layer expert"]:
    """The part of choices that each expert gets in every layer, in traces of `tokens` tokens of one topic each."""
    found = []
    for number, topic in enumerate(topics):
        counted = tally(sample_trace(only_topic(process, topic), tokens, seed + number).experts, process.num_experts)
        found.append(counted / counted.sum(axis=1, keepdims=True))
    return np.stack(found)


def only_topic(process: GatingProcess, topic: int) -> GatingProcess:
    """The process whose requests all keep to one topic. Raises `TraceError` for a topic that it does not have."""
    known = len(process.preferences.topics)
    if not 0 <= topic < known:
        raise TraceError(f"topic is {topic}, expected 0 to {known - 1}")
    return replace(process, requests=replace(process.requests, topics=np.full_like(process.requests.topics, topic)))
