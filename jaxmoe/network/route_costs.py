"""Routes from the nodes that tokens visit to any one node: what they cost at given prices of links, and what they load.

What a tree takes towards *every* node follows from running sums of prices, with no loop over nodes or paths. All arrays
end with an axis of lanes: batches, each with prices of its own.
"""

import abc
from collections.abc import Sequence
from functools import partial, singledispatch

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.network.loads import crossed, flow_loads, path_sums
from jaxmoe.network.xy import running_maxima


class AbstractRoutes(eqx.Module):
    """One route for every token of a round from each node that it visits to any one node."""

    @abc.abstractmethod
    def costs(self, price: Float[Array, "link lane"]) -> Float[Array, "token node lane"]:
        """Cost of every token where it meets at every node."""

    @abc.abstractmethod
    def loaded(
        self, load: Float[Array, "link lane"], home: Int[Array, "token lane"], weight: Float[Array, "token lane"]
    ) -> Float[Array, "link lane"]:
        """The load of every link, and the messages on it if tokens meet at their homes."""


@singledispatch
def trees(topology: AbstractTopology, visited: Float[Array, "token node lane"]) -> Sequence[AbstractRoutes]:
    """The trees of every token: along the network's paths, and those of the other order of directions, if any.

    `trees.register(Mine)` gives a class of network a faster rule.
    """
    networks = [topology] if topology.crossed() is None else [topology, crossed(topology)]
    return [_Trees.of(network, visited) for network in networks]


@trees.register(Mesh)
def _of_mesh(topology: Mesh, visited: Float[Array, "token node lane"]) -> Sequence[AbstractRoutes]:
    first = topology.routing == "yx"
    return [_MeshTrees.of(topology.shape, visited, across) for across in (first, not first)]


class Unicasts(AbstractRoutes):
    """The network's own paths, of which every one is paid for."""

    topology: AbstractTopology
    visited: Float[Array, "token node lane"]

    def costs(self, price):
        return _by_lanes(lambda visited, price: visited @ path_sums(self.topology, price))(self.visited, price)

    def loaded(self, load, home, weight):
        sent = self.visited * weight[:, None]
        return load + _by_lanes(lambda sent, home: flow_loads(self.topology, sent, home))(sent, home)


_by_lanes = partial(jax.vmap, in_axes=-1, out_axes=-1)


class _Trees(AbstractRoutes):
    """Trees on any network: which links lead from visited nodes to every node."""

    passing: Float[Array, "token node link lane"]

    @classmethod
    def of(cls, topology: AbstractTopology, visited: Float[Array, "token node lane"]) -> "_Trees":
        nodes, links = topology.num_nodes, topology.num_links
        link, pair = topology.hops()
        start, stop = pair // nodes, pair % nodes

        def passing(visited: Float[Array, "token node"]) -> Float[Array, "token node link"]:
            reached = jax.ops.segment_max(visited.T[start], stop * links + link, nodes * links)
            return jnp.maximum(reached, 0).T.reshape(-1, nodes, links)

        return cls(_by_lanes(passing)(visited))

    def costs(self, price):
        return _by_lanes(jnp.matmul)(self.passing, price)

    def loaded(self, load, home, weight):
        def of_lane(passing, home, weight):
            return weight @ jnp.take_along_axis(passing, home[:, None, None], axis=1)[:, 0]

        return load + _by_lanes(of_lane)(self.passing, home, weight)


class _MeshTrees(AbstractRoutes):
    """Trees on a mesh: links in the rows of visited nodes, then those in the column of where they meet.

    Of links between successive positions, `up` leads to the higher one. A link of a row carries what was visited before
    it, if the tree ends beyond it; one of the column what any row before it has. `across`, rows and columns change
    places.
    """

    up_x: Float[Array, "segment_x y token lane"]
    down_x: Float[Array, "segment_x y token lane"]
    up_y: Float[Array, "segment_y token lane"]
    down_y: Float[Array, "segment_y token lane"]
    shape: tuple[int, int] = eqx.field(static=True)
    across: bool = eqx.field(static=True)

    @classmethod
    def of(cls, shape: tuple[int, int], visited: Float[Array, "token node lane"], across: bool) -> "_MeshTrees":
        there = jnp.moveaxis(visited, 0, 1).reshape(*shape, len(visited), -1)
        there = jnp.swapaxes(there, 0, 1) if across else there
        (up_x, down_x), (up_y, down_y) = _reached(there), _reached(there.max(axis=0))
        return cls(up_x, down_x, up_y, down_y, shape, across)

    def costs(self, price):
        up_x, down_x, up_y, down_y = (each[:, :, None] for each in _by_side(self.shape, price, self.across))
        up_y, down_y = (jnp.swapaxes(each, 0, 1) for each in (up_y, down_y))  # [segment, x, 1, lane]
        row = _towards(self.up_x * up_x, self.down_x * down_x)
        column = _towards((self.up_y[:, None] * up_y)[:, None], (self.down_y[:, None] * down_y)[:, None])
        cost = row + column  # [y, x, token, lane]
        cost = cost if self.across else jnp.swapaxes(cost, 0, 1)
        return jnp.moveaxis(cost.reshape(-1, *cost.shape[2:]), 0, 1)

    def loaded(self, load, home, weight):
        x, y = self.shape[::-1] if self.across else self.shape
        at_x, at_y = (home % x, home // x) if self.across else (home // y, home % y)
        positions = jnp.arange(max(x, y))[:, None, None]
        beyond_x, beyond_y = at_x > positions[: x - 1], at_y > positions[: y - 1]  # [segment, token, lane]
        column = ((at_x == positions[:x]) * weight)[:, None]
        sides = (
            self.up_x * (beyond_x * weight)[:, None],
            self.down_x * (~beyond_x * weight)[:, None],
            column * (self.up_y * beyond_y),
            column * (self.down_y * ~beyond_y),
        )  # [segment or x, y or segment, token, lane]
        ordered = [jnp.swapaxes(sides[side], 0, 1) for side in (2, 3, 0, 1)] if self.across else sides

        def add(token: Int[Array, ""], load: Float[Array, "link lane"]) -> Float[Array, "link lane"]:
            first = 0
            for side in ordered:  # in place, token by token: what is joined or summed up first is slow on CPUs
                added = jax.lax.dynamic_index_in_dim(side, token, 2, False).reshape(-1, side.shape[-1])
                load = jax.lax.dynamic_update_slice_in_dim(load, load[first : first + len(added)] + added, first, 0)
                first += len(added)
            return load

        return jax.lax.fori_loop(0, len(weight), add, load)


def _reached(
    there: Float[Array, "position *lead"],
) -> tuple[Float[Array, "segment *lead"], Float[Array, "segment *lead"]]:
    """Running maxima of what lies before every segment, and of what lies after it."""
    return running_maxima(there)[:-1], running_maxima(there[::-1])[::-1][1:]


def _towards(
    up: Float[Array, "segment line *lead"], down: Float[Array, "segment line *lead"]
) -> Float[Array, "position *lead"]:
    """What lies between each position and both ends, of all lines: segments before it count `up`, others `down`.

    By a product with ones and zeros, which is quicker than running sums.
    """
    segments, lines = up.shape[:2]
    before = np.arange(segments + 1)[:, None] > np.arange(segments)
    counted = np.repeat(np.concatenate([before, ~before], axis=1)[:, :, None], lines, axis=2)
    both = jnp.concatenate([up, down])
    return jnp.tensordot(jnp.asarray(counted, up.dtype), both, 2, precision=jax.lax.Precision.HIGHEST)


def _by_side(shape: tuple[int, int], per_link: Float[Array, "link lane"], across: bool) -> tuple[Array, ...]:
    """Links up and down along x [segment, y], and up and down along y [x, segment]; `across`, of the turned mesh."""
    x, y = shape
    lanes = per_link.shape[-1]
    sides = jnp.split(per_link, np.cumsum([(x - 1) * y, (x - 1) * y, x * (y - 1)]))
    shapes = [(x - 1, y, lanes)] * 2 + [(x, y - 1, lanes)] * 2
    shaped = [side.reshape(each) for side, each in zip(sides, shapes, strict=True)]
    return tuple(jnp.swapaxes(shaped[side], 0, 1) for side in (2, 3, 0, 1)) if across else tuple(shaped)
