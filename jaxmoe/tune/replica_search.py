"""Local search of slots by the time of a layer: two copies change places, or one becomes a copy of another expert.

The value of a move is that of `ReplicaModel` but for delays of paths: the busiest link or port in dispatch and in
combine and the slowest node, batch by batch, and what moving from a placement before costs. All are sums over experts,
so a move changes those of two experts. The weights of these sums come from the machine of the model; a test holds both
equal. Compiled by Numba: tens of thousands of moves of a few thousand numbers each.
"""

from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.engine.copies import ReplicaModel
from jaxmoe.placement.replica_choice import REPLICA_CHOICES
from jaxmoe.placement.slots import copies_of_slots
from jaxmoe.threads import side_by_side
from jaxmoe.tune.replica_weights import Weights

WARM, COLD = 2e-3, 1e-5  # temperatures of the first and the last move, relative to the value of the start


def searched_slots(
    model: ReplicaModel,
    weights: Weights,
    loads: Float[np.ndarray, "layer batch expert"],
    start: Int[np.ndarray, "layer slot"],
    moves: int,
    p95_weight: float = 0.0,
    before: Int[np.ndarray, "layer slot"] | None = None,
    horizon: float = np.inf,
    repeats: bool = False,
    seed: int = 0,
) -> Int[np.ndarray, "layer slot"]:
    """Slots after local search: by the count model, no layer is worse than at the start.

    The value is the mean over batches mixed with the 95th percentile, and the seconds of moving from `before` over
    `horizon` steps. Where ranks have no expert twice at the start, none has at the end, unless `repeats`.
    """
    layers, experts, nodes = len(start), loads.shape[2], len(weights.origin)
    kind = REPLICA_CHOICES.index(model.choice)
    known = np.ones((layers, experts, nodes), bool)
    if before is not None and np.isfinite(horizon):
        known = copies_of_slots(before, experts, nodes) > 0
    far = np.where(known[:, :, :, None], weights.distance, np.iinfo(np.int64).max)  # [layer, expert, from, to]
    nearest = far.argmin(axis=2)
    each = 1 / horizon if np.isfinite(horizon) else 0.0
    given = np.ascontiguousarray(loads, np.float64)

    def searched(layer: int) -> Int[np.ndarray, " slot"]:
        held = start[layer].reshape(nodes, -1).astype(np.int64)
        found = _search(
            weights, given[layer], held, kind, known[layer], nearest[layer], each, p95_weight, repeats, moves, seed
        )
        return found.ravel()

    return np.stack([*side_by_side(searched, range(layers))])


@njit(cache=True, nogil=True)
@no_type_check
def _profile(weights, count, kind, network, rows):
    """Write how one choice of an expert with `count` [node] copies spreads over resources and nodes.

    `network` [resource] gets the vectors that pass each link or port, `rows` [node] the part that each node computes.
    """
    network[:] = 0
    rows[:] = 0
    nodes, copies = len(count), count.sum()
    if kind == 0:
        for node in range(nodes):
            if count[node]:
                part = count[node] / copies
                rows[node] = part
                for index in range(len(network)):
                    network[index] += part * weights.even[node, index]
        return
    hosts = np.flatnonzero(count)
    for source in range(nodes):
        lives = weights.origin[source]
        if kind == 2:
            named, node = source % copies, 0
            for host in hosts:
                if named < count[host]:
                    node = host
                    break
                named -= count[host]
            _sent(weights, node, source, lives, network, rows)
            continue
        least, equal = np.int64(1 << 60), 0
        for host in hosts:
            hops = weights.distance[source, host]
            if hops < least:
                least, equal = hops, count[host]
            elif hops == least:
                equal += count[host]
        for host in hosts:
            if weights.distance[source, host] == least:
                _sent(weights, host, source, lives * count[host] / equal, network, rows)


@njit(cache=True, nogil=True)
@no_type_check
def _sent(weights, node, source, part, network, rows):
    rows[node] += part
    pair = node * len(rows) + source
    for step in range(weights.first[pair], weights.first[pair + 1]):
        network[weights.resource[step]] += part


@njit(cache=True, nogil=True)
@no_type_check
def _begun(weights, load, held, kind, known, nearest):
    """Copies, profiles of experts, busy sums of the network and of nodes by batch, and of moves."""
    batches, experts = load.shape
    nodes, resources = len(held), len(weights.dispatch)
    count = np.zeros((experts, nodes), np.int64)
    for node in range(nodes):
        for expert in held[node]:
            count[expert, node] += 1
    network, rows = np.zeros((experts, resources)), np.zeros((experts, nodes))
    levels, channels = weights.reading.shape
    busy, asked = np.zeros((batches, resources)), np.zeros((batches, nodes + levels * channels))
    moving = np.zeros(resources)
    for expert in range(experts):
        _profile(weights, count[expert], kind, network[expert], rows[expert])
        for batch in range(batches):
            for resource in range(resources):
                busy[batch, resource] += load[batch, expert] * network[expert, resource]
            _asked(weights, asked[batch], load[batch, expert], rows[expert], 1.0)
        for node in range(nodes):
            if count[expert, node] and not known[expert, node]:
                _moved(weights, moving, nearest[expert, node], node, 1.0)
    return count, network, rows, busy, asked, moving


@njit(cache=True, nogil=True)
@no_type_check
def _asked(weights, asked, load, rows, sign):
    """Add the seconds that the choices of an expert keep nodes and memory channels busy, times `sign`."""
    levels, channels = weights.reading.shape
    nodes = len(rows)
    for node in range(nodes):
        if rows[node] > 0:
            amount = load * rows[node]
            asked[node] += sign * amount * weights.work[node]
            for level in range(levels):
                channel = weights.channel[level, node]
                taken = min(amount, 1.0) * weights.reading[level, channel] + amount * weights.passing[level, channel]
                asked[nodes + level * channels + channel] += sign * taken


@njit(cache=True, nogil=True)
@no_type_check
def _moved(weights, moving, source, node, sign):
    if source != node:
        pair = source * len(weights.origin) + node
        for step in range(weights.first[pair], weights.first[pair + 1]):
            moving[weights.resource[step]] += sign * weights.moving[weights.resource[step]]


@njit(cache=True, nogil=True)
@no_type_check
def _times(weights, busy, asked):
    times = np.empty(len(busy))
    for batch in range(len(busy)):
        dispatch, combine = 0.0, 0.0
        for index in range(busy.shape[1]):
            dispatch = max(dispatch, busy[batch, index] * weights.dispatch[index])
            combine = max(combine, busy[batch, index] * weights.combine[index])
        times[batch] = dispatch + combine + asked[batch].max()
    return times


@njit(cache=True, nogil=True)
@no_type_check
def _value(times, p95_weight, moving, each):
    value = times.mean()
    if p95_weight > 0:
        value += p95_weight * (_p95(times) - value)
    return value + each * moving.max()


@njit(cache=True, nogil=True)
@no_type_check
def _p95(times):
    """95th percentile, as NumPy's `quantile`, which Numba takes five seconds to compile."""
    rank = 1 + 0.95 * (len(times) - 1)
    part = rank - int(rank)
    largest = np.full(len(times) + 1 - int(rank), -np.inf)  # in ascending order
    for value in times:
        if value > largest[0]:
            at = 0
            while at + 1 < len(largest) and largest[at + 1] < value:
                largest[at] = largest[at + 1]
                at += 1
            largest[at] = value
    return largest[0] * (1 - part) + largest[min(1, len(largest) - 1)] * part


@njit(cache=True, nogil=True)
@no_type_check
def _search(weights, load, held, kind, known, nearest, each, p95_weight, repeats, moves, seed):
    np.random.seed(seed)
    nodes = len(held)
    count, network, rows, busy, asked, moving = _begun(weights, load, held, kind, known, nearest)
    value = _value(_times(weights, busy, asked), p95_weight, moving, each)
    begun, best, kept = value, value, held.copy()
    likely = np.zeros(load.shape[1])
    for batch in range(len(load)):
        for expert in range(len(likely)):
            likely[expert] += load[batch, expert]
    likely = np.cumsum(likely + 1e-9 * load.sum())
    likely /= likely[-1]
    new_network, new_rows = np.zeros((2, len(weights.dispatch))), np.zeros((2, nodes))
    for move in range(moves):
        node, slot, other, place, second = _proposed(held, count, likely, repeats)
        if second < 0:
            continue
        pair, new_moving = (held[node, slot], second), moving.copy()
        _count_moves(count, pair, node, other, 1)
        _change_moves(weights, new_moving, count, known, nearest, pair[0], second, node, other)
        new_busy, new_asked = busy.copy(), asked.copy()
        for index in range(2):
            expert = pair[index]
            _profile(weights, count[expert], kind, new_network[index], new_rows[index])
            change = new_network[index] - network[expert]
            for batch in range(len(load)):
                amount = load[batch, expert]
                for resource in range(len(change)):
                    new_busy[batch, resource] += amount * change[resource]
                _asked(weights, new_asked[batch], amount, rows[expert], -1.0)
                _asked(weights, new_asked[batch], amount, new_rows[index], 1.0)
        found = _value(_times(weights, new_busy, new_asked), p95_weight, new_moving, each)
        warmth = begun * WARM * (COLD / WARM) ** (move / moves)
        if found > value and np.random.random() >= np.exp((value - found) / warmth):
            _count_moves(count, pair, node, other, -1)
            continue
        value, moving, busy, asked = found, new_moving, new_busy, new_asked
        held[node, slot] = second
        if other >= 0:
            held[other, place] = pair[0]
        for index in range(2):
            expert = pair[index]
            for resource in range(len(weights.dispatch)):
                network[expert, resource] = new_network[index, resource]
            for row in range(nodes):
                rows[expert, row] = new_rows[index, row]
        if value < best * (1 - 1e-9):
            best, kept = value, held.copy()
    return kept


@njit(cache=True, nogil=True)
@no_type_check
def _proposed(held, count, likely, repeats):
    """A slot and the expert that it gets, from another slot or, where that is -1, as a further copy; -1 for neither."""
    nodes, per_rank = held.shape
    node, slot = np.random.randint(nodes), np.random.randint(per_rank)
    first = held[node, slot]
    if np.random.random() < 0.5:
        if np.random.random() < 0.7:
            second = min(np.searchsorted(likely, np.random.random()), len(likely) - 1)
        else:
            second = np.random.randint(len(likely))
        if second == first or count[first].sum() < 2 or (not repeats and count[second, node]):
            return node, slot, -1, -1, -1
        return node, slot, -1, -1, second
    other, place = np.random.randint(nodes), np.random.randint(per_rank)
    second = held[other, place]
    if other == node or second == first or (not repeats and (count[second, node] or count[first, other])):
        return node, slot, other, place, -1
    return node, slot, other, place, second


@njit(cache=True, nogil=True)
@no_type_check
def _count_moves(count, pair, node, other, sign):
    count[pair[0], node] -= sign
    count[pair[1], node] += sign
    if other >= 0:
        count[pair[1], other] -= sign
        count[pair[0], other] += sign


@njit(cache=True, nogil=True)
@no_type_check
def _change_moves(weights, moving, count, known, nearest, first, second, node, other):
    """Change `moving`, s by resource, for a move after which experts have `count` [expert, node] copies.

    However many copies of an expert a node has, its weights travel there once.
    """
    if count[first, node] == 0 and not known[first, node]:
        _moved(weights, moving, nearest[first, node], node, -1.0)
    if count[second, node] == 1 and not known[second, node]:
        _moved(weights, moving, nearest[second, node], node, 1.0)
    if other >= 0:
        if count[second, other] == 0 and not known[second, other]:
            _moved(weights, moving, nearest[second, other], other, -1.0)
        if count[first, other] == 1 and not known[first, other]:
            _moved(weights, moving, nearest[first, other], other, 1.0)
