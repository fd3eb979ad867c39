"""Branch and bound over supports, from good ones that moves of single experts lead to."""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float
from numba import njit
from optimum_costs import Costs, Sets

from jaxmoe.placement.rounding import SLACK

# Good supports to begin with: one expert at a time moves to its best set of nodes, until none gains.


def descend(costs: Costs, sets: Sets) -> Sets:
    """The local optimum reached from `sets`, by the bound on compute that node sets give."""
    sets, best = sets.copy(), np.inf
    contained = _contained(len(costs.supply[0]))
    while True:
        before = best
        for expert in range(len(sets)):
            seconds = _responses(costs, sets, expert, contained)
            choice = int(np.argmin(seconds))
            if seconds[choice] < best:
                sets[expert], best = choice, float(seconds[choice])
        if not best < before:
            return sets


def _contained(sets: int) -> np.ndarray:
    """1 where one set of nodes is part of another, [set, set2]."""
    number = np.arange(sets)
    return (number[:, None] & ~number == 0).astype(float)


def _responses(costs: Costs, sets: Sets, expert: int, contained: np.ndarray) -> Float[np.ndarray, " set"]:
    """Seconds with `expert` on every set and all others where they are; infinite for none at all."""
    others = np.arange(len(sets)) != expert
    at = sets[others]
    alone = np.einsum("bij,ijsr->bsr", costs.tokens[:, others][:, :, others], costs.pair_time[at[:, None], at])
    moved = np.einsum("bj,ajsr->absr", costs.tokens[:, expert, others], costs.pair_time[:, at])
    moved += np.einsum("bj,jasr->absr", costs.tokens[:, others, expert], costs.pair_time[at])
    moved += np.einsum("b,aasr->absr", costs.tokens[:, expert, expert], costs.pair_time)
    within = costs.demand[:, others] @ contained[at] + costs.demand[:, expert, None] * contained[:, None]
    communication = costs.runs * (alone + moved).max(axis=3).sum(axis=2).mean(axis=1)
    seconds = communication + costs.compute((within / costs.supply).max(axis=-1))
    seconds[0] = np.inf
    return seconds


# Branch and bound over the sets of nodes that experts live on, one expert after the other.
#
# The bound counts what is certain: of the network, the tokens between experts that have their place, and of every
# other expert the least that any set still open to it would add, link by link; of compute, the work of every set of
# nodes that experts cannot leave. Pairs of which neither has a place are counted by halves, half for either, each at
# the least that the other makes possible. A set that would take an expert past the best plan known is closed to it,
# and the expert with the fewest open sets is placed next. No symmetry is assumed: gathering at the lowest-numbered
# host leaves none.


class Tables(NamedTuple):
    """Constant tables of the search. A run is one stage of one batch; the objective is the mean over batches."""

    pair_time: np.ndarray  # [set, set2, run, resource]
    tokens: np.ndarray  # [run, expert, expert2]
    demand: np.ndarray  # [row, expert]
    supply: np.ndarray  # [row, set]
    even: np.ndarray  # [batch]
    half: np.ndarray  # [expert, expert2, set, run, resource]: the first's half of a pair, by its set
    part: float  # of the objective that one run is


class Tree(NamedTuple):
    """State of the depth-first search. Level d has d experts in their places; another choice overwrites it."""

    level: np.ndarray  # [1]
    entered: np.ndarray  # [1]: whether the level's children are listed
    nodes: np.ndarray  # [1]: explored so far
    place: np.ndarray  # [expert]: set, or 0
    allowed: np.ndarray  # [level, expert, set]
    certain: np.ndarray  # [level, run, resource]: s of experts that have their places, and halves
    added: np.ndarray  # [level, expert, set, run, resource]: s that an expert would add
    within: np.ndarray  # [level, row, set]: demand of placed experts that no other node can meet
    expert: np.ndarray  # [level]: the expert that is placed there
    child: np.ndarray  # [level, set]: the sets to try, the best bound first
    bound: np.ndarray  # [level, set]: their bounds, s
    children: np.ndarray  # [level]
    tried: np.ndarray  # [level]


def plant(costs: Costs, best: float) -> tuple[Tables, Tree]:
    """Tables and the root of the tree for finding plans that take less than `best` s."""
    batches, experts, _ = costs.tokens.shape
    sets, _, stages, resources = costs.pair_time.shape
    pair_time = np.ascontiguousarray(np.tile(costs.pair_time, (1, 1, batches, 1)))
    tokens = np.repeat(costs.tokens, stages, axis=0)
    half, allowed = _halves(costs, pair_time, tokens, best)
    # Numba compiles anew for arrays that lie in memory in another way.
    demand, supply = np.ascontiguousarray(costs.demand), np.ascontiguousarray(costs.supply)
    tables = Tables(pair_time, tokens, demand, supply, costs.even, half, costs.runs / batches)
    levels, busy = experts + 1, (batches * stages, resources)
    counter, number = np.zeros(1, np.int64), np.zeros(levels, np.int64)
    tree = Tree(
        level=counter,
        entered=counter.copy(),
        nodes=counter.copy(),
        place=np.zeros(experts, np.int64),
        allowed=np.zeros((levels, experts, sets), bool),
        certain=np.zeros((levels, *busy)),
        added=np.zeros((levels, experts, sets, *busy)),
        within=np.zeros((levels, *costs.supply.shape)),
        expert=number,
        child=np.zeros((levels, sets), np.int64),
        bound=np.zeros((levels, sets)),
        children=number.copy(),
        tried=number.copy(),
    )
    tree.allowed[0] = allowed
    tree.added[0] = half.sum(axis=1) + np.einsum("gee,aagr->eagr", tokens, pair_time)
    return tables, tree


def _halves(costs: Costs, pair_time: np.ndarray, tokens: np.ndarray, best: float) -> tuple[np.ndarray, np.ndarray]:
    """Half the least load of every pair of experts by the set of the first, and the sets the first may live on."""
    experts, sets = tokens.shape[1], len(pair_time)
    number = np.arange(sets)
    union = number[:, None] | number
    half = np.zeros((experts, experts, sets, *pair_time.shape[2:]))
    allowed = np.broadcast_to(number > 0, (experts, sets)).copy()
    for one, other in zip(*np.nonzero(~np.eye(experts, dtype=bool)), strict=True):
        # The two by themselves: what both must do within the nodes that either lives on.
        both = costs.demand[:, one] + costs.demand[:, other]
        together = costs.compute(both / costs.supply.T[union]) < best
        together &= (number[:, None] > 0) & (number > 0)
        load = np.einsum("g,acgr->acgr", tokens[:, one, other], pair_time)
        load += np.einsum("g,cagr->acgr", tokens[:, other, one], pair_time)
        least = np.where(together[..., None, None], load, np.inf).min(axis=1)
        allowed[one] &= together.any(axis=1)
        half[one, other] = np.where(np.isfinite(least), least / 2, 0)
    return half, allowed


def open_bound(tree: Tree) -> float:
    """Lower bound on the time of all plans still to be searched, s; infinite when none are left."""
    level, entered = int(tree.level[0]), int(tree.entered[0])
    ends = [tree.bound[d, tree.tried[d]] for d in range(level + entered) if tree.tried[d] < tree.children[d]]
    if level >= 0 and not entered:
        ends.append(tree.bound[level - 1, tree.tried[level - 1] - 1] if level else 0.0)
    return float(min(ends, default=np.inf))


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles. Plain loops over numbers: operations
# on whole arrays would take a minute to compile.


@njit(cache=True)
@no_type_check
def explore(tables, tree, best, nodes):
    """Search on for plans below `best` s. True at a full set of places, `tree.place`, that may be one; else False.

    Returns after so many `nodes`, or with the level at -1 when all is searched. A set of places that was returned
    is not looked at again.
    """
    experts = len(tree.place)
    stop = tree.nodes[0] + nodes
    while tree.level[0] >= 0:
        level = tree.level[0]
        if not tree.entered[0]:
            if tree.nodes[0] >= stop:
                return False
            tree.nodes[0] += 1
            _list_children(tables, tree, level, best)
            tree.entered[0] = 1
        expert, tried = tree.expert[level], tree.tried[level]
        tree.place[expert] = 0
        if tried == tree.children[level] or tree.bound[level, tried] >= best:
            tree.children[level] = tried  # children come in order: the rest is no better
            tree.level[0] -= 1
            continue
        tree.tried[level] += 1
        tree.place[expert] = tree.child[level, tried]
        if level == experts - 1:
            return True
        _place(tables, tree, level, expert, tree.child[level, tried])
        tree.level[0] += 1
        tree.entered[0] = 0
    return False


@njit(cache=True)
@no_type_check
def _list_children(tables, tree, level, best):
    """Close sets that cannot be part of a better plan, and list the open ones of the expert with the fewest."""
    experts, sets = tree.allowed.shape[1:]
    bounds = np.empty((experts, sets))
    closed = 1
    while closed > 0:  # what was closed may have had the least load: the bound is better now
        closed = _close(tables, tree, level, best, bounds)
    expert, fewest = -1, sets + 1
    for e in range(experts):
        if tree.place[e] == 0:
            left = 0
            for s in range(sets):
                left += tree.allowed[level, e, s]
            if left < fewest:
                expert, fewest = e, left
    tree.expert[level], tree.children[level], tree.tried[level] = expert, fewest, 0
    listed = 0
    for s in range(sets):
        if tree.allowed[level, expert, s]:
            at = listed
            while at > 0 and tree.bound[level, at - 1] > bounds[expert, s]:
                tree.bound[level, at], tree.child[level, at] = tree.bound[level, at - 1], tree.child[level, at - 1]
                at -= 1
            tree.bound[level, at], tree.child[level, at] = bounds[expert, s], s
            listed += 1


@njit(cache=True)
@no_type_check
def _close(tables, tree, level, best, bounds):
    """Bound every open set of every expert that has no place, and close those not below `best`: how many."""
    experts, sets = bounds.shape
    runs, resources = tree.certain.shape[1:]
    rows = len(tables.demand)
    least = np.full((experts, runs, resources), np.inf)
    total = tree.certain[level].copy()
    for expert in range(experts):
        if tree.place[expert] > 0:
            continue
        for s in range(sets):
            if tree.allowed[level, expert, s]:
                for run in range(runs):
                    for r in range(resources):
                        least[expert, run, r] = min(least[expert, run, r], tree.added[level, expert, s, run, r])
        for run in range(runs):
            for r in range(resources):
                total[run, r] += least[expert, run, r]
    slowest = np.zeros(rows)
    for row in range(rows):
        for s in range(sets):
            slowest[row] = max(slowest[row], tree.within[level, row, s] / tables.supply[row, s])
    closed = 0
    for expert in range(experts):
        for s in range(sets):
            if tree.place[expert] > 0 or not tree.allowed[level, expert, s]:
                continue
            seconds = 0.0
            for run in range(runs):
                busiest = 0.0
                for r in range(resources):
                    others = total[run, r] - least[expert, run, r]
                    busiest = max(busiest, others + tree.added[level, expert, s, run, r])
                seconds += tables.part * busiest
            seconds += _mean_compute(tables, tree.within, level, slowest, expert, s)
            bounds[expert, s] = seconds
            if seconds >= best:
                tree.allowed[level, expert, s] = False
                closed += 1
    return closed


@njit(cache=True)
@no_type_check
def _mean_compute(tables, within, level, slowest, expert, hosts):
    """Least mean seconds of the slowest node when `expert` joins on `hosts`; infinite where memory does not do.

    `slowest` is the most seconds of any set of nodes so far, one for every row.
    """
    rows, sets = within.shape[1:]
    seconds = 0.0
    for row in range(rows):
        most = slowest[row]
        s = hosts
        while s < sets:
            most = max(most, (within[level, row, s] + tables.demand[row, expert]) / tables.supply[row, s])
            s = (s + 1) | hosts  # the next set that all hosts belong to
        if row < rows - 1:
            seconds += max(most, tables.even[row])
        elif most > SLACK:
            return np.inf
    return seconds / (rows - 1)


@njit(cache=True)
@no_type_check
def _place(tables, tree, level, placed, hosts):
    """Fill the next level, where one more expert has its place."""
    experts, sets = tree.allowed.shape[1:]
    runs, resources = tree.certain.shape[1:]
    for run in range(runs):
        for r in range(resources):
            tree.certain[level + 1, run, r] = tree.certain[level, run, r] + tree.added[level, placed, hosts, run, r]
    for row in range(len(tables.demand)):
        for s in range(sets):
            joins = tables.demand[row, placed] if hosts & ~s == 0 else 0.0
            tree.within[level + 1, row, s] = tree.within[level, row, s] + joins
    for expert in range(experts):
        for s in range(sets):
            tree.allowed[level + 1, expert, s] = tree.allowed[level, expert, s]
            if tree.place[expert] > 0 or not tree.allowed[level, expert, s]:
                continue
            # The pair's load is known now, in place of both its halves.
            for run in range(runs):
                there, back = tables.tokens[run, placed, expert], tables.tokens[run, expert, placed]
                for r in range(resources):
                    tree.added[level + 1, expert, s, run, r] = (
                        tree.added[level, expert, s, run, r]
                        + there * tables.pair_time[hosts, s, run, r]
                        + back * tables.pair_time[s, hosts, run, r]
                        - tables.half[placed, expert, hosts, run, r]
                        - tables.half[expert, placed, s, run, r]
                    )
