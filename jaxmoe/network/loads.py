"""Loads of directed links under XY paths, by prefix sums: O(nodes * side) work, no links x pairs matrix.

A flow along +x occupies the links between its source and destination column. So the load of a link is the
load of the link before it, plus what starts at its lower node, minus what has ended there: a running sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.hardware.mesh import Mesh


def _line_loads(
    flow: Float[Array, "lane start stop"],
) -> tuple[Float[Array, "lane segment"], Float[Array, "lane segment"]]:
    """Loads of the segments of parallel lines, up and down, from flows between positions on each line."""
    upward = jnp.triu(flow, 1)
    downward = jnp.tril(flow, -1)
    # What crosses a position from now on: what started there minus what ended there.
    up = jnp.cumsum(upward.sum(axis=2) - upward.sum(axis=1), axis=1)
    down = jnp.cumsum(downward.sum(axis=1) - downward.sum(axis=2), axis=1)
    return up[:, :-1], down[:, :-1]


def link_loads(shape: tuple[int, int], traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """What every directed link carries, in the unit of `traffic` [source, destination]; the diagonal is free.

    XY paths (hd_moe IV-B2). Links are numbered as in `jaxmoe.hardware.mesh`.
    """
    x, y = shape
    flow = traffic.reshape(x, y, x, y)
    plus_x, minus_x = _line_loads(jnp.swapaxes(flow.sum(axis=3), 0, 1))  # [row y, from x, to x]
    plus_y, minus_y = _line_loads(flow.sum(axis=0).swapaxes(0, 1))  # [column x, from y, to y]
    return jnp.concatenate([plus_x.T.ravel(), minus_x.T.ravel(), plus_y.ravel(), minus_y.ravel()])


def path_sums(shape: tuple[int, int], per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Sum of a per-link quantity along the XY path of every [source, destination] pair.

    The transpose of `link_loads`: loads = A' traffic, path sums = A per_link, with one and the same A.
    """
    nodes = shape[0] * shape[1]
    pairs = jax.ShapeDtypeStruct((nodes, nodes), per_link.dtype)
    (sums,) = jax.linear_transpose(lambda traffic: link_loads(shape, traffic), pairs)(per_link)
    return sums


def path_maxima(shape: tuple[int, int], per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along the XY path of every pair; 0 for a node to itself."""
    x, y = shape
    across, along = (x - 1) * y, x * (y - 1)
    plus_x, minus_x, plus_y, minus_y = jnp.split(per_link, [across, 2 * across, 2 * across + along])
    in_rows = _line_maxima(plus_x.reshape(x - 1, y).T, minus_x.reshape(x - 1, y).T)  # [row y, from x, to x]
    in_columns = _line_maxima(plus_y.reshape(x, y - 1), minus_y.reshape(x, y - 1))  # [column x, from y, to y]
    first = jnp.swapaxes(in_rows, 0, 1)[:, :, :, None]
    second = jnp.swapaxes(in_columns, 0, 1)[None]
    return jnp.maximum(first, second).reshape(x * y, x * y)


def _line_maxima(
    up: Float[Array, "lane segment"], down: Float[Array, "lane segment"]
) -> Float[Array, "lane start stop"]:
    start, stop, segment = np.ogrid[: up.shape[1] + 1, : up.shape[1] + 1, : up.shape[1]]
    going_up, going_down = (start <= segment) & (segment < stop), (stop <= segment) & (segment < start)
    values = jnp.where(going_up, up[:, None, None, :], 0) + jnp.where(going_down, down[:, None, None, :], 0)
    return jnp.max(values, axis=-1, initial=0)
