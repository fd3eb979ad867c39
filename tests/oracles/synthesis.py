"""How a token chooses its experts, choice by choice in plain loops; and small processes at random."""

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxmoe.traces import MISSING
from jaxmoe.traces.synthesis import GatingProcess, Preferences, RequestDeck

Order = tuple[int, ...]


def random_preferences(seed: int, layers: int, experts: int, topics: int = 1, strength: float = 1.0) -> Preferences:
    """Normal log-weights everywhere, so that every term matters; `usual` are the shares of no trace."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(strength * rng.standard_normal(shape), jnp.float32)

    return Preferences(
        popularity=normal(layers, experts),
        topics=normal(topics, layers, experts),
        phases=normal(2, layers, experts),
        first_tokens=normal(1, layers, experts),
        from_layer=normal(layers, experts, experts),
        from_token=normal(layers, experts, experts),
        together=normal(layers, experts, experts),
        usual=jnp.asarray(rng.random((layers, experts)), jnp.float32),
    )


def same_requests(count: int, length: int, prompt: int | None = None, topics: Sequence[int] = (0,)) -> RequestDeck:
    """Requests of one length whose topics are these by turns, each for the whole of a request; dealt in order."""
    topic = np.resize(np.asarray(topics), count)[:, None]
    prompts = None if prompt is None else np.full(count, prompt)
    return RequestDeck(np.full(count, length), prompts, topic, window=length, drift=1.0)


def random_process(
    seed: int, layers: int, experts: int, top_k: int, requests: RequestDeck, strength: float = 1.0
) -> GatingProcess:
    """A process with as many topics as its requests name."""
    topics = int(requests.topics.max()) + 1
    preferences = random_preferences(seed, layers, experts, topics, strength)
    facts = {"model": "m", "dataset": "d", "source": "s"}
    return GatingProcess(preferences, requests, tuple(range(3, 3 + 2 * layers, 2)), top_k, facts)


def log_weights(
    tables: Preferences, layer: int, topic: int, phase: int, before: Sequence[int] | None, below: Sequence[int]
) -> list[float]:
    """Log-weights before any choice. `before`: experts of the token before, `None` at the first of a request."""
    experts = tables.popularity.shape[1]
    found = []
    for e in range(experts):
        value = float(tables.popularity[layer, e]) + float(tables.topics[topic, layer, e])
        value += float(tables.phases[phase, layer, e])
        value += sum(float(tables.from_layer[layer, b, e]) for b in below if b != MISSING and layer > 0)
        if before is None:
            value += float(tables.first_tokens[0, layer, e])
            value += sum(float(tables.usual[layer, b]) * float(tables.from_token[layer, b, e]) for b in range(experts))
        else:
            value += sum(float(tables.from_token[layer, b, e]) for b in before if b != MISSING)
        found.append(value)
    return found


def log_probability(weights: Sequence[float], together: np.ndarray, order: Sequence[int]) -> float:
    """Of these choices in this order; a missing one counts nowhere."""
    weights, total, taken = list(weights), 0.0, set()
    for choice in order:
        if choice == MISSING:
            continue
        most = max(weights)
        rest = sum(math.exp(w - most) for e, w in enumerate(weights) if e not in taken)
        total += weights[choice] - most - math.log(rest)
        taken.add(choice)
        weights = [w + float(together[choice, e]) for e, w in enumerate(weights)]
    return total


def orders(weights: Sequence[float], together: np.ndarray, top_k: int) -> dict[Order, float]:
    """The probability of every order of choices."""
    every = itertools.permutations(range(len(weights)), top_k)
    return {order: math.exp(log_probability(weights, together, order)) for order in every}


def orders_within_groups(weights: Sequence[float], top_k: int, groups: int, allowed: int) -> dict[Order, float]:
    """The same without co-activation, where only the groups of the first experts to win may be chosen from."""
    size = len(weights) // groups
    found = {}
    for order in itertools.permutations(range(len(weights)), top_k):
        probability, open_to, left = 1.0, set(), set(range(len(weights)))
        for choice in order:
            may = {e for e in left if len(open_to) < allowed or e // size in open_to}
            if choice not in may:
                probability = 0.0
                break
            probability *= math.exp(weights[choice]) / sum(math.exp(weights[e]) for e in may)
            open_to.add(choice // size)
            left.remove(choice)
        found[order] = probability
    return found


def log_likelihood(
    tables: Preferences,
    experts: np.ndarray,
    before: np.ndarray,
    position: Sequence[int],
    topic: Sequence[int],
    phase: Sequence[int],
) -> float:
    """Mean over tokens of the log-probability of all choices, int [token, layer, top_k]."""
    total = 0.0
    for t, token in enumerate(experts.tolist()):
        for layer, order in enumerate(token):
            last = None if position[t] == 0 else before[t, layer].tolist()
            below = token[layer - 1] if layer else []
            weights = log_weights(tables, layer, topic[t], phase[t], last, below)
            total += log_probability(weights, tables.together[layer], order)
    return total / len(experts)
