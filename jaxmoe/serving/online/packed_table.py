"""Step tables as flat arrays, which compiled code reads; the same sums in the same order as `StepTable.seconds`."""

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.serving.online.step_table import FEATURES, StepTable


class PackedTables(NamedTuple):
    """Several tables, one behind another: `T` terms, each with some of `A` axes."""

    first_term: Int[np.ndarray, " tables+1"]
    first_axis: Int[np.ndarray, " T+1"]
    first_value: Int[np.ndarray, " T"]
    common: Int[np.ndarray, " T"]  # 1: of scope `group`
    by_context: Int[np.ndarray, " T"]  # 1: changes with the contexts of sequences that decode
    changing: Int[np.ndarray, " tables"]  # the one term that changes with contexts, on its last axis alone, or -1
    weight: Float[np.ndarray, " T"]
    feature: Int[np.ndarray, " A"]
    first_point: Int[np.ndarray, " A+1"]
    points: Float[np.ndarray, " P"]
    values: Float[np.ndarray, " V"]
    near: Int[np.ndarray, " A"]  # where each axis was read last
    corners: Float[np.ndarray, " C"]  # room for the corners of a cell, and where each is
    places: Int[np.ndarray, " C"]
    ends: Float[np.ndarray, "2"]  # the last term that was read, at both ends of its cell on its last axis
    parts: Float[np.ndarray, "ranks T"]  # terms of the step before


def pack(tables: Sequence[StepTable], ranks: int) -> PackedTables:
    """Tables as arrays. The last fields are room to work in, so every thread needs a pack of its own."""
    terms = [term for table in tables for term in table.terms]
    grids = [np.asarray(grid, float) for term in terms for grid in term.grids]
    values = [np.asarray(term.values, float).ravel() for term in terms]
    room = 2 ** max((len(term.grids) for term in terms), default=0)
    return PackedTables(
        first_term=_starts([len(table.terms) for table in tables]),
        first_axis=_starts([len(term.grids) for term in terms]),
        first_value=_starts([len(each) for each in values])[:-1],
        common=np.array([term.scope == "group" for term in terms], np.int64),
        by_context=np.array([not {"context", "longest"}.isdisjoint(term.features) for term in terms], np.int64),
        changing=_changing(tables),
        weight=np.array([term.weight for term in terms], float),
        feature=np.array([FEATURES.index(name) for term in terms for name in term.features], np.int64),
        first_point=_starts([len(grid) for grid in grids]),
        points=np.concatenate([np.zeros(0), *grids]),
        values=np.concatenate([np.zeros(0), *values]),
        near=np.zeros(len(grids), np.int64),
        corners=np.zeros(room),
        places=np.zeros(room, np.int64),
        ends=np.zeros(2),
        parts=np.zeros((ranks, len(terms))),
    )


def _changing(tables: Sequence[StepTable]) -> Int[np.ndarray, " tables"]:
    found, first = np.full(len(tables), -1), 0
    for at, table in enumerate(tables):
        changing = [term for term in table.terms if not {"context", "longest"}.isdisjoint(term.features)]
        alone = len(changing) == 1 and changing[0].scope == "rank" and len(changing[0].grids[-1]) > 1
        if alone and changing[0].features[-1] == "context" and "longest" not in changing[0].features:
            found[at] = first + next(place for place, term in enumerate(table.terms) if term is changing[0])
        first += len(table.terms)
    return found


def _starts(sizes: Sequence[int]) -> Int[np.ndarray, " starts"]:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles. Passing a tuple of many arrays takes
# longer than what short functions do with it, so they are inlined.


@njit(inline="always")
@no_type_check
def step_seconds(tables, table, features, only_contexts):
    """Seconds of a step in which some rank has tokens; `features` is [rank, feature].

    With `only_contexts`, all else is as in the step before, which was read from the same table.
    """
    slowest, common, parts = 0.0, 0.0, tables.parts
    first, end = tables.first_term[table], tables.first_term[table + 1]
    for rank in range(len(features)):
        own = 0.0
        for term in range(first, end):
            if rank > 0 and tables.common[term]:
                continue
            if not only_contexts or tables.by_context[term]:
                parts[rank, term] = _read(tables, term, features[rank])
            if tables.common[term]:
                common += parts[rank, term]
            else:
                own += parts[rank, term]
        if rank == 0 or own > slowest:
            slowest = own
    return slowest + common


@njit(inline="always")
@no_type_check
def _read(tables, term, features):
    corners, places = tables.corners, tables.places
    places[0], size, stride = tables.first_value[term], 1, 1
    first, end = tables.first_axis[term], tables.first_axis[term + 1]
    for axis in range(end - 1, first - 1, -1):
        start, length = tables.first_point[axis], tables.first_point[axis + 1] - tables.first_point[axis]
        if length > 1:
            low = _cell(tables, axis, start, length, features[tables.feature[axis]])
            for place in range(size):
                places[place] += low * stride
                places[size + place] = places[place] + stride
            size *= 2
        stride *= length
    for place in range(size):
        corners[place] = tables.values[places[place]]
    for axis in range(first, end):
        start = tables.first_point[axis]
        if tables.first_point[axis + 1] - start > 1:
            low = start + tables.near[axis]
            if axis == end - 1:
                tables.ends[0], tables.ends[1] = corners[0], corners[1]
            at = max(features[tables.feature[axis]], tables.points[start])
            part = (at - tables.points[low]) / (tables.points[low + 1] - tables.points[low])
            size //= 2
            for place in range(size):
                corners[place] += part * (corners[size + place] - corners[place])
    return tables.weight[term] * corners[0]


@njit(inline="always")
@no_type_check
def _cell(tables, axis, start, length, at):
    """The cell of an axis: below its last point but one, the last point that is not above `at`."""
    points, low = tables.points, tables.near[axis]
    while low > 0 and points[start + low] > at:
        low -= 1
    while low < length - 2 and points[start + low + 1] <= at:
        low += 1
    tables.near[axis] = low
    return low


@njit(inline="always")
@no_type_check
def steps_of_cell(tables, table, features, context, decoding, steps, most, ends, until):
    """Steps of one rank after one that was read, as long as its changing term is read from the same cell.

    The sum of contexts grows by `decoding` in each. Returns this sum, the number of steps, and the end of the last.
    """
    term, parts, points, last = tables.changing[table], tables.parts, tables.points, tables.first_term[table + 1]
    _read(tables, term, features[0])
    axis = tables.first_axis[term + 1] - 1
    low = tables.first_point[axis] + tables.near[axis]
    upper = points[low + 1] if low < tables.first_point[axis + 1] - 2 else np.inf
    width, value, rise = points[low + 1] - points[low], tables.ends[0], tables.ends[1] - tables.ends[0]
    before, common = 0.0, 0.0
    for each in range(tables.first_term[table], last):
        if tables.common[each]:
            common += parts[0, each]
        elif each < term:
            before += parts[0, each]
    while steps < most and ends < until:
        at = (context + decoding) / decoding
        if not points[low] <= at < upper:
            break
        own = before + tables.weight[term] * (value + (at - points[low]) / width * rise)
        for each in range(term + 1, last):
            if not tables.common[each]:
                own += parts[0, each]
        context, steps, ends = context + decoding, steps + 1, ends + (own + common)
    return context, steps, ends
