"""Loads of links under XY paths, by running sums along rows and columns."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.relax import OneOf, as_weights, is_number, look_up

# Running sums by triangular products: several times faster than `jnp.cumsum` on CPUs.

WHOLE = 64  # positions up to which one product is faster than two smaller ones


def prefix_sums(values: Float[Array, "*lead position"]) -> Float[Array, "*lead position"]:
    """Sums of the last axis up to and with each position: within blocks, plus all blocks before."""
    size = values.shape[-1]
    block = max(part for part in range(1, math.isqrt(size) + 1) if size % part == 0)
    if size == 1:
        return values
    if size <= WHOLE or block == 1:  # a prime number of positions has no blocks
        return values @ _triangle(size, 0, values.dtype)
    parts = values.reshape(*values.shape[:-1], size // block, block)
    within = parts @ _triangle(block, 0, values.dtype)
    before = within[..., -1] @ _triangle(size // block, 1, values.dtype)
    return (within + before[..., None]).reshape(values.shape)


def _triangle(size: int, diagonal: int, dtype: jnp.dtype) -> Float[Array, "position position"]:
    """Ones above a diagonal."""
    return jnp.asarray(np.triu(np.ones((size, size)), diagonal), dtype)


# Loads of the directed links of a mesh under XY paths, by prefix sums: no links x pairs matrix.
#
# A packet moves along x in the row of its source, then along y in the column of its destination. So all that links
# need to know is how much moves from x to x in every row and from y to y in every column. On such a line, the load of
# a link is the load of the one before it, plus what starts there, minus what has ended.


class LineTraffic(eqx.Module):
    """Traffic between positions on the rows and columns of a mesh."""

    along_x: Float[Array, "x_from y x_to"]  # in the row of the source
    along_y: Float[Array, "y_from x y_to"]  # in the column of the destination

    def link_loads(self) -> Float[Array, " link"]:
        """Load of every directed link under XY routing (hd_moe IV-B2), in the unit of the traffic.

        Links are numbered as in `jaxmoe.hardware.networks`.
        """
        plus_x, minus_x = _line_loads(self.along_x)
        plus_y, minus_y = _line_loads(self.along_y)
        return jnp.concatenate([plus_x.ravel(), minus_x.ravel(), plus_y.T.ravel(), minus_y.T.ravel()])


def _line_loads(
    traffic: Float[Array, "start lane stop"],
) -> tuple[Float[Array, "segment lane"], Float[Array, "segment lane"]]:
    """Loads of the segments of parallel lines, upwards and downwards."""
    positions = np.arange(traffic.shape[0])
    up = traffic * (positions[:, None, None] < positions)
    down = traffic * (positions[:, None, None] > positions)
    # What crosses a position from now on: what started there minus what ended there, [lane, position].
    net_up = up.sum(axis=2).T - up.sum(axis=0)
    net_down = down.sum(axis=0) - down.sum(axis=2).T
    return prefix_sums(net_up).T[:-1], prefix_sums(net_down).T[:-1]


def flow_traffic(
    shape: tuple[int, int],
    source: Float[Array, "flow node"],
    destination: OneOf,
) -> LineTraffic:
    """Traffic of flows that send source[f, n] from node n to the flow's node, or to all in the parts given."""
    x, y = shape
    if not is_number(destination):
        return LineTraffic(*_spread_traffic(shape, source, destination))
    # Sums over a side by products, and the narrow factor first: several times faster on CPUs.
    stop_x = look_up(destination, _side(shape, 0, source.dtype))
    start_y = source @ _side(shape, 1, source.dtype)
    return LineTraffic(
        along_x=jnp.moveaxis((stop_x.T @ source).reshape(x, x, y), 0, 2),
        along_y=(start_y.T @ as_weights(destination, x * y, source.dtype)).reshape(y, x, y),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_traffic(
    shape: tuple[int, int], source: Float[Array, "flow node"], destination: Float[Array, "flow node2"]
) -> tuple[Float[Array, "x_from y x_to"], Float[Array, "y_from x y_to"]]:
    """Traffic along x and y of flows to many nodes, from the messages between any two, which delays need as well."""
    messages = (source.T @ destination).reshape(*shape, *shape)
    return messages.sum(axis=3), messages.sum(axis=0)


def _spread_traffic_forward(shape, source, destination):
    return _spread_traffic(shape, source, destination), (source, destination)


def _spread_traffic_backward(shape, known, changes):
    """The derivative by messages is a product of two narrow factors: the sides of a mesh are shorter than its nodes."""
    (source, destination), (along_x, along_y) = known, changes
    nodes = shape[0] * shape[1]
    starting = jnp.concatenate([along_x.reshape(nodes, -1), _side(shape, 1, source.dtype)], axis=1)
    stopping = jnp.concatenate([_side(shape, 0, source.dtype), along_y.reshape(-1, nodes).T], axis=1)
    return (destination @ stopping) @ starting.T, (source @ starting) @ stopping.T


_spread_traffic.defvjp(_spread_traffic_forward, _spread_traffic_backward)


def _side(shape: tuple[int, int], axis: int, dtype: jnp.dtype) -> Float[Array, "node position"]:
    """1 where a node has a position on a side of the mesh."""
    position = np.indices(shape)[axis].ravel()
    return jnp.asarray(position[:, None] == np.arange(shape[axis]), dtype)


def link_loads(shape: tuple[int, int], traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """Load of every directed link of a mesh under XY routing, in the unit of `traffic` [source, destination].

    The diagonal, from a node to itself, loads no link.
    """
    x, y = shape
    flow = traffic.reshape(x, y, x, y)
    return LineTraffic(along_x=flow.sum(axis=3), along_y=flow.sum(axis=0)).link_loads()


def tree_loads(
    shape: tuple[int, int],
    source: Float[Array, "flow node"],
    destination: OneOf,
    weight: Float[Array, " flow"],
    crossed: bool = False,
) -> Float[Array, " link"]:
    """Loads of trees: in flow f every node with a source of 1 sends one vector to the destination, merged on the way.

    The tree is the union of XY paths: a row has one vector beyond the first source in it, the column of the destination
    one beyond the first row with any source. So running maxima of the sources along rows and columns are all it
    takes; there is no loop over flows. Relaxed, a flow goes to several nodes in parts. Crossed trees are unions of YX
    paths: those of XY paths on the mesh whose sides have changed places. Weights come last, so that batches of the same
    flows that differ in weight share the rest.
    """
    # Flows last: of what is computed one by one, long stretches are alike.
    start = source.T.reshape(*shape, -1)
    if not crossed:
        along_x, along_y = _tree_loads(start, destination, weight, np.indices(shape))
    else:
        along_y, along_x = _tree_loads(jnp.swapaxes(start, 0, 1), destination, weight, np.indices(shape)[::-1])
        along_x, along_y = ([load.T for load in loads] for loads in (along_x, along_y))
    return jnp.concatenate([load.ravel() for load in (*along_x, *along_y)])


Loads = list[Float[Array, "_ _"]]


def _tree_loads(
    start: Float[Array, "x y flow"],
    destination: OneOf,
    weight: Float[Array, " flow"],
    position: Int[np.ndarray, "2 _ _"],
) -> tuple[Loads, Loads]:
    """Loads of links along x, upwards and downwards, and of those along y; `position` has x and y of every node."""
    x, y = position.reshape(2, -1, 1)
    columns, rows, _ = start.shape
    beyond_x, beyond_y = x > np.arange(columns - 1), y > np.arange(rows - 1)  # [node, segment]
    in_rows = _reached(start)
    brought = in_rows.up[-1][:, None]  # whether a row has anything to bring to the column
    along_x = _segment_loads(in_rows, destination, weight, beyond_x[:, :, None])
    column = x == np.arange(columns)
    along_y = _segment_loads(_reached(brought), destination, weight, beyond_y[:, :, None], column[:, None])
    return along_x, [load.T for load in along_y]


class _Reached(NamedTuple):
    """Running maxima over successive positions, upwards and downwards: each up to and with its position."""

    up: Float[Array, "position lane flow"]
    down: Float[Array, "position lane flow"]


def _reached(start: Float[Array, "position lane flow"]) -> _Reached:
    return _Reached(running_maxima(start), running_maxima(start[::-1])[::-1])


@jax.custom_jvp
def running_maxima(values: Float[Array, "position *lead"]) -> Float[Array, "position *lead"]:
    """Largest of the non-negative values up to and with each position. One by one: a pass for each runs soonest."""
    return jnp.concatenate(list(itertools.accumulate(jnp.split(values, len(values)), jnp.maximum)))


@running_maxima.defjvp
def _running_maxima_jvp(primals, tangents):
    """A loop, which compiles in a third of the time of all positions one by one; equals share as in `jnp.maximum`."""
    (values,), (tangent,) = primals, tangents
    reached = running_maxima(values)
    before = jnp.concatenate([jnp.full_like(values[:1], -1), reached[:-1]])
    new = (values > before) + (values == before) / 2

    def follow(reached: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        new, tangent = given
        reached = reached + new * (tangent - reached)
        return reached, reached

    return reached, jax.lax.scan(follow, jnp.zeros_like(tangent[0]), (new.astype(tangent.dtype), tangent))[1]


def _segment_loads(
    reached: _Reached,
    destination: OneOf,
    weight: Float[Array, " flow"],
    beyond: Bool[np.ndarray, "node segment 1"],
    line: Bool[np.ndarray, "node 1 line"] | bool = True,
) -> Loads:
    """Loads of the segments between successive positions, upwards and downwards.

    A flow loads a segment by what of it stops beyond, if anything starts before. All lanes stop alike, or a single one
    stops on several lines.
    """

    def loads(crossing: Float[Array, "segment _ flow"], stopping: Bool[np.ndarray, "node segment _"]):
        table = jnp.asarray(stopping.reshape(len(stopping), -1), weight.dtype)
        stops = look_up(destination, table).T.reshape(*stopping.shape[1:], len(weight))
        return (crossing * stops) @ weight

    return [loads(reached.up[:-1], beyond & line), loads(reached.down[1:], ~beyond & line)]


# What lies along the path of every pair: of lines first, then of both parts of the path.

Lines = Float[Array, "lane start stop"]


def path_sums(
    shape: tuple[int, int], per_link: Float[Array, " link"], crossed: bool = False
) -> Float[Array, "node node2"]:
    """Sum of a per-link quantity along the XY path of every pair; crossed along the YX path."""
    return _along_paths(shape, per_link, crossed, _line_sums, jnp.add)


def path_maxima(
    shape: tuple[int, int], per_link: Float[Array, " link"], crossed: bool = False
) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every such path; 0 for a node to itself."""
    return _along_paths(shape, per_link, crossed, _line_maxima, jnp.maximum)


@partial(jax.jit, static_argnums=(0, 2, 3, 4))  # also called by itself: one program in place of twenty
def _along_paths(
    shape: tuple[int, int],
    per_link: Float[Array, " link"],
    crossed: bool,
    of_lines: Callable[..., Lines],
    both: Callable[[Array, Array], Array],
) -> Float[Array, "node node2"]:
    x, y = shape
    across, along = (x - 1) * y, x * (y - 1)
    plus_x, minus_x, plus_y, minus_y = jnp.split(per_link, [across, 2 * across, 2 * across + along])
    in_rows, in_columns = (
        of_lines(up, down) if up.shape[1] else jnp.zeros((len(up), 1, 1), up.dtype)
        for up, down in (
            (plus_x.reshape(x - 1, y).T, minus_x.reshape(x - 1, y).T),  # [row y, from x, to x]
            (plus_y.reshape(x, y - 1), minus_y.reshape(x, y - 1)),  # [column x, from y, to y]
        )
    )
    # In the order [from x, from y, to x, to y]: along x in the row of the source, along y in the column of the
    # destination; crossed along y in the column of the source, along x in the row of the destination.
    if crossed:
        parts = jnp.moveaxis(in_rows, 0, 2)[:, None], in_columns[:, :, None]
    else:
        parts = jnp.swapaxes(in_rows, 0, 1)[..., None], jnp.swapaxes(in_columns, 0, 1)[None]
    return both(*parts).reshape(x * y, x * y)


def _line_sums(up: Float[Array, "lane segment"], down: Float[Array, "lane segment"]) -> Lines:
    """Sums of the segments from one position to another, as differences of running sums."""
    start, stop = np.indices((up.shape[1] + 1,) * 2)
    up, down = (jnp.pad(prefix_sums(each), ((0, 0), (1, 0))) for each in (up, down))
    return jnp.where(start < stop, up[:, None, :] - up[:, :, None], down[:, :, None] - down[:, None, :])


def _line_maxima(up: Float[Array, "lane segment"], down: Float[Array, "lane segment"]) -> Lines:
    """Largest of the segments from one position to another.

    Two runs of 2**k segments, which may overlap, cover any way of that length up to twice as much: so there is no array
    of start, stop and segment.
    """
    count = up.shape[1]
    start, stop = np.indices((count + 1, count + 1))
    first, length = np.minimum(start, stop), abs(stop - start)
    level = np.log2(np.maximum(length, 1)).astype(int)
    runs = [jnp.stack([up, down])]  # [way, lane, segment]: the largest of 2**level segments from each on
    for width in 2 ** np.arange(level.max()):
        runs.append(jnp.maximum(runs[-1], jnp.pad(runs[-1][..., width:], ((0, 0), (0, 0), (0, width)))))
    at_ends = (np.minimum(first, count - 1), np.maximum(first + length - 2**level, 0))
    found = [jnp.stack(runs)[level, (start > stop).astype(int), :, at] for at in at_ends]  # [start, stop, lane]
    return jnp.moveaxis(jnp.where((length > 0)[..., None], jnp.maximum(*found), 0), -1, 0)
