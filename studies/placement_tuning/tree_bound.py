"""What communication of a given plan takes at least under any exchange, and what trees chosen for the loads take.

**The bound.** Give every directed link a length, none negative. In combine, each element of a token's result is a sum
of a part from every node that the token visits. Wherever that element ends, the links that its parts pass hold a tree
from all visited nodes to that place, and each of them carries a number of this token and element at least, though parts
are added up on the way. So all tokens together load links with at least the sum of their shortest trees, as measured by
the lengths; and in L seconds links carry no more than L times the sum of length x rate. The quotient bounds L, whatever
the lengths. In dispatch all is mirrored. It holds for homes, trees, rings and reduce-scatter alike, for homes chosen
element by element, and for vectors cut in pieces that go different ways. Assumed is that experts are computed where
they are placed, that links are loaded as in the congestion model, and that no two tokens' numbers are coded into one.
Latencies, chunks and node ports are left out, for they only add; so are exchanges that are not complete.

**The lengths.** The best ones make the bound what fractions of trees can reach. They are sought by raising, step by
step, the lengths of links that short trees of some of the tokens use more than others.

**How good the bound is.** `balanced_trees` times an exchange: a home and a tree for every token, short by lengths that
rise with the load of what other tokens have taken, thought over a few times. No vector is cut.
"""

from typing import NamedTuple

import numpy as np
from exchange_bound import visited_nodes
from jaxtyping import Bool, Float
from trees import Links, lengths_of, links_of, shortest, spread

from jaxmoe.engine import Layer
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import Congestion
from jaxmoe.traces import Batch

STEPS = 60  # in search of lengths ...
SAMPLE = 128  # ... on so many sets of visited nodes
FIRST, MOMENTUM, COOLING, AVERAGED = 0.3, 0.8, 10, 0.9  # of these steps, in logarithms of lengths
PASSES = 2
SEED = 0


class _Sets(NamedTuple):
    """Sets of nodes that tokens visit, and how many tokens of each batch visit each."""

    visited: Bool[np.ndarray, "set vertex"]
    tokens: Float[np.ndarray, "batch set"]


def tree_bound(model: Layer, share: Float[np.ndarray, "expert node"], batches: Batch) -> Float[np.ndarray, " batch"]:
    """Communication time of a sharded plan that no exchange beats, s, for drawn or merged batches of one layer.

    Where tokens visit few of many nodes it is above `exchange_bound`, which looks at single nodes; where they visit
    most, below. Raises `ValueError` for replicas and other time models.
    """
    topology, costs = _topology(model), model.costs
    links, order = links_of(np.asarray(topology.link_ends))
    sets = _sets(share, batches, len(links.leaving) - 1)
    there, back = _rates(topology, order)
    least = _least_busy(links, sets, there)
    mirrored = least if np.allclose(there, back) else _least_busy(links, sets, back)
    return least * float(costs.combine_bytes) + mirrored * float(costs.dispatch_bytes)


def balanced_trees(
    model: Layer, share: Float[np.ndarray, "expert node"], batches: Batch, passes: int = PASSES
) -> Float[np.ndarray, " batch"]:
    """Communication time of a sharded plan along trees chosen one by one for the loads, s; batches as in `tree_bound`.

    Every token has a tree, merged ones a tree for each that they stand for; dispatch takes it backwards. The delay of
    the longest path counts, with a whole chunk at every link. Raises `ValueError` for replicas, other time models and
    node ports.
    """
    topology, costs = _topology(model), model.costs
    if topology.injection_bandwidth is not None or topology.ejection_bandwidth is not None:
        raise ValueError("balanced_trees is of networks whose node ports are not limited")
    links, order = links_of(np.asarray(topology.link_ends))
    sets = _sets(share, batches, len(links.leaving) - 1)
    both = float(costs.combine_bytes) + float(costs.dispatch_bytes)
    # Dispatch has the same loads on the links the other way: as fast as the slower of the two.
    rate = np.min(_rates(topology, order), axis=0) / both
    vector = max(float(costs.combine_bytes), float(costs.dispatch_bytes))
    chunk = float(model.time_model.chunk_bytes)  # type: ignore[attr-defined]
    latency = np.asarray(topology.link_latency, float)
    latency = np.maximum(latency, latency[np.asarray(topology.reverse_links)])[order]
    delay = latency + (min(chunk, vector) if chunk > 0 else vector) / (rate * both)
    seconds = []
    for tokens in sets.tokens:
        if not tokens.any():
            seconds.append(0.0)
            continue
        each = np.ceil(tokens).astype(int)
        some = np.random.default_rng(SEED).permutation(np.repeat(np.arange(len(each)), each))
        busy, wait = spread(links, sets.visited[some], (tokens / np.maximum(each, 1))[some], rate, delay, passes, SEED)
        seconds.append(busy + 2 * (wait + float(topology.endpoint_latency)))
    return np.array(seconds)


def _topology(model: Layer) -> AbstractTopology:
    if model.mode != "sharded" or not isinstance(model.time_model, Congestion):
        raise ValueError("trees are of sharded plans under the congestion model")
    return model.machine.topology


def _rates(topology: AbstractTopology, order: np.ndarray) -> Float[np.ndarray, "way link"]:
    """What links carry in a second, B, there and back."""
    rates = np.asarray(topology.link_rate, float)
    return np.stack([rates[order], rates[np.asarray(topology.reverse_links)][order]])


def _sets(share: Float[np.ndarray, "expert node"], batches: Batch, vertices: int) -> _Sets:
    """Tokens that visit more than one node, by the nodes that they visit; further vertices are switches."""
    visited, weight = visited_nodes(share, batches)
    away = np.pad(visited, ((0, 0), (0, 0), (0, vertices - visited.shape[2])))
    packed, index = np.unique(np.packbits(away.reshape(-1, vertices), axis=1), axis=0, return_inverse=True)
    sets = np.unpackbits(packed, axis=1, count=vertices).astype(bool)
    tokens = np.stack(
        [np.bincount(row, w, len(sets)) for row, w in zip(index.reshape(weight.shape), weight, strict=True)]
    )
    several = sets.sum(axis=1) > 1
    return _Sets(sets[several], tokens[:, several])


def _least_busy(links: Links, sets: _Sets, rate: Float[np.ndarray, " link"]) -> Float[np.ndarray, " batch"]:
    """Seconds that vectors of one byte keep the most loaded link busy at least."""
    if not len(sets.visited):
        return np.zeros(len(sets.tokens))
    scale = rate.mean()
    length = _lengths(links, sets, rate / scale)
    return sets.tokens @ lengths_of(links, sets.visited, length) / scale


def _lengths(links: Links, sets: _Sets, rate: Float[np.ndarray, " link"]) -> Float[np.ndarray, " link"]:
    """Lengths that make the bound large; the sum of length x rate is 1."""
    often = sets.tokens.sum(axis=0)
    few = np.flatnonzero(often)
    if len(few) > SAMPLE:
        few = np.random.default_rng(SEED).choice(len(often), SAMPLE, replace=False, p=often / often.sum())
    visited, weight = sets.visited[few], often[few] if len(few) < SAMPLE else np.ones(len(few))

    def scaled(exponent: Float[np.ndarray, " link"]) -> Float[np.ndarray, " link"]:
        length = np.exp(exponent - exponent.max())
        return length / (length @ rate)

    even = exponent = mean = np.zeros(len(rate))
    speed = np.zeros(len(rate))
    for step in range(STEPS):
        length = scaled(exponent)
        load = shortest(links, visited, weight, length, step)
        speed = MOMENTUM * speed + load / rate / (load @ length) - 1
        exponent = exponent + FIRST / (1 + step / COOLING) * np.clip(speed, -1, 3)
        mean = AVERAGED * mean + (1 - AVERAGED) * exponent
    return max(map(scaled, (even, mean)), key=lambda length: often @ lengths_of(links, sets.visited, length))
