"""Statistics of traces, token by token and pair by pair, and small traces at random."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.traces import MISSING, GatingTrace

TOKENS, LAYERS, EXPERTS, TOP_K = 37, 3, 6, 3


def random_trace(
    seed: int, missing: float = 0.2, *, tokens: int = TOKENS, experts: int = EXPERTS, top_k: int = TOP_K
) -> GatingTrace:
    """Skewed choices, of which some are missing, in sequences of any length and phases that come in runs."""
    rng = np.random.default_rng(seed)
    arrival = rng.exponential(size=(tokens, LAYERS, experts)) * rng.permutation(1 + np.arange(experts))
    chosen = arrival.argsort(axis=2)[..., :top_k].astype(np.int16)
    chosen[rng.random(chosen.shape) < missing * rng.integers(2)] = MISSING
    starts = np.flatnonzero(rng.random(tokens) < rng.choice([0, 0.2, 0.6]))
    seq_start = np.union1d([0], starts)
    return GatingTrace(
        experts=chosen,
        num_experts=experts,
        layer_ids=np.array([4, 7, 2]),
        seq_start=seq_start,
        is_repeat=None,
        facts={},
        phase=np.cumsum(rng.random(tokens) < 0.15) % 2,
        seq_name=tuple(str(name) for name in rng.choice(["law", "art", "sports"], len(seq_start))),
    )


def chosen(trace: GatingTrace, token: int, layer: int) -> list[int]:
    return [int(expert) for expert in trace.experts[token, layer] if expert != MISSING]


def steps(trace: GatingTrace, only: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Neighbouring tokens of one sequence, both of them marked."""
    first = set(trace.seq_start.tolist())
    marked = np.ones(trace.num_tokens, bool) if only is None else only
    return [(t, t + 1) for t in range(trace.num_tokens - 1) if t + 1 not in first and marked[t] and marked[t + 1]]


def load(trace: GatingTrace, tokens: Sequence[int] | None = None) -> np.ndarray:
    counts = np.zeros((trace.experts.shape[1], trace.num_experts), int)
    for token in range(trace.num_tokens) if tokens is None else tokens:
        for layer in range(len(counts)):
            for expert in chosen(trace, token, layer):
                counts[layer, expert] += 1
    return counts


def pair_counts(trace: GatingTrace, only: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """All counts of a trace, by the names of `PairCounts`, and how much neighbours share."""
    layers, experts = trace.experts.shape[1], trace.num_experts
    tokens = [t for t in range(trace.num_tokens) if only is None or only[t]]
    found = {
        "load": load(trace, tokens),
        "token_pairs": np.zeros((layers, experts, experts), int),
        "layer_pairs": np.zeros((layers - 1, experts, experts), int),
        "together": np.zeros((layers, experts, experts), int),
        "slots": np.zeros(layers, int),
        "shared": np.zeros(layers, int),
    }
    for layer in range(layers):
        for before, after in steps(trace, only):
            one, other = chosen(trace, before, layer), chosen(trace, after, layer)
            for pair in itertools.product(one, other):
                found["token_pairs"][layer, *pair] += 1
            found["shared"][layer] += len(set(one) & set(other))
            found["slots"][layer] += min(len(one), len(other))
        for token in tokens:
            for i, j in itertools.combinations(sorted(chosen(trace, token, layer)), 2):
                found["together"][layer, i, j] += 1
    for token, layer in itertools.product(tokens, range(layers - 1)):
        for pair in itertools.product(chosen(trace, token, layer), chosen(trace, token, layer + 1)):
            found["layer_pairs"][layer, *pair] += 1
    return found


def coverage(events: Sequence[float], share: float) -> float:
    """Share of events on the most frequent pairs."""
    total = sum(events)
    return sum(sorted(events, reverse=True)[: round(share * len(events))]) / total if total else math.nan


def coverage_of(chosen_by: Sequence[float], events: Sequence[float], share: float) -> float:
    """Share of events on the pairs that are the most frequent elsewhere."""
    order = sorted(range(len(events)), key=lambda pair: (-chosen_by[pair], pair))
    total = sum(events)
    return sum(events[pair] for pair in order[: round(share * len(events))]) / total if total else math.nan


def cv(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean if mean else math.nan


def kl(base: Sequence[float], other: Sequence[float], epsilon: float) -> float:
    """camoe Eq. 17 and 18."""
    experts, total = len(base), 0.0
    for count, other_count in zip(base, other, strict=True):
        p = (count + epsilon) / (sum(base) + epsilon * experts)
        q = (other_count + epsilon) / (sum(other) + epsilon * experts)
        total += p * math.log(p / q)
    return total
