"""What the exchanges of `jaxmoe.placement.exchange` send: from visits to the flows of combine; dispatch mirrors them."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.hardware.mesh import cut_blocks, ring_order
from jaxmoe.network.homes import homes
from jaxmoe.network.traffic import Flows, Phases
from jaxmoe.network.visits import Visits
from jaxmoe.placement.exchange import Exchange, ExchangeError, Gather, ReduceScatter, Rings, exchange_of


class AbstractExchange(eqx.Module):
    """Turns visits into flows of hidden vectors."""

    description: eqx.AbstractVar[Exchange]

    @abc.abstractmethod
    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        """The flows of combine, in hidden vectors."""

    @property
    def name(self) -> str:
        return self.description.name


class GatherExchange(AbstractExchange):
    """Every visited node brings one vector to the token's home, alone or along a tree."""

    description: Gather = eqx.field(static=True, default=Gather())

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        rule, route = self.description.home, self.description.route
        one = jnp.ones((), visits.visited.dtype)
        if route == "unicast" and rule == "lowest_host" and visits.named is not None:
            # Tokens with one home make one flow: far fewer flows than tokens.
            messages = (visits.named * visits.weight[:, None]).T @ visits.visited
            return ((Flows(messages, visits.home, one),),)
        home = homes(rule, topology, visits)
        if route == "unicast":
            return ((Flows(visits.visited * visits.weight[:, None], home, one),),)
        if route == "split_tree":
            return (tuple(Flows(visits.visited, home, one / 2, visits.weight, route=way) for way in BOTH_TREES),)
        return ((Flows(visits.visited, home, one, visits.weight, route=route),),)


BOTH_TREES = ("tree", "cross_tree")


class ReduceScatterExchange(AbstractExchange):
    """Every visited node sends each of the others its part of the vector."""

    description: ReduceScatter = eqx.field(static=True, default=ReduceScatter())

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        visited = visits.visited
        spread = visited / jnp.maximum(visited.sum(axis=1, keepdims=True), 1e-9)
        sent = visited * visits.weight[:, None]
        return ((Flows(sent, spread, jnp.ones((), visited.dtype), messages=sent.T @ visited),),)


class RingExchange(AbstractExchange):
    """Ring reduce-scatter inside each of several equal groups of nodes, all at once; then between groups.

    Each of the R nodes of a ring sends 1/R of the vectors of the tokens that visit the ring, R - 1 times over. Eq. 4 of
    hd_moe is the limit of many nodes: 4 B h / BW instead of (R-1)/R of it.
    """

    group: Int[Array, " node"]  # ring of a node
    successor: Int[Array, " node"]  # next node on the ring
    place: Int[Array, " node"]  # of a node in its group; nodes of equal place exchange slices
    size: int = eqx.field(static=True)  # nodes of one ring
    description: Rings = eqx.field(static=True)

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        nodes = self.group.shape[0]
        member = jax.nn.one_hot(self.group, nodes // self.size, dtype=visits.weight.dtype)
        visiting = jnp.max(visits.visited[:, :, None] * member, axis=1)  # [token, group]
        around = self._around((visits.weight @ visiting)[self.group] / self.size)
        if self.description.count == 1 or not self.description.between:
            return ((around,),)
        return (around,), (self._between(visiting, visits.weight),)

    def _around(self, vectors: Float[Array, " node"]) -> Flows:
        following = jax.nn.one_hot(self.successor, len(vectors), dtype=vectors.dtype)
        sending = jnp.diag((vectors > 0).astype(vectors.dtype))  # a ring that no token visits sends nothing
        if not self.description.both_ways or self.size <= 2:
            return Flows(sending, following, vectors, rounds=self.size - 1)
        return Flows(
            jnp.concatenate([sending, sending]),
            jnp.concatenate([following, following.T]),
            jnp.concatenate([vectors, vectors]) / 2,
            rounds=self.size - 1,
        )

    def _between(self, visiting: Float[Array, "token group"], weight: Float[Array, " token"]) -> Flows:
        """Slices of tokens that visit several groups, of which each keeps an equal part."""
        kept = visiting / jnp.maximum(visiting.sum(axis=1, keepdims=True), 1e-9)
        shared = (visiting * weight[:, None]).T @ kept  # vectors from group to group
        met = (visiting * weight[:, None]).T @ visiting  # tokens
        alike = (self.place[:, None] == self.place).astype(weight.dtype)
        vectors = shared[self.group][:, self.group] * alike / self.size
        sent = vectors.sum(axis=1)
        return Flows(
            source=jnp.eye(len(sent), dtype=weight.dtype),
            destination=vectors / jnp.maximum(sent, 1e-9)[:, None],
            vectors=sent,
            # Slices from one node to another go as one message.
            messages=jnp.minimum(met, 1)[self.group][:, self.group] * alike,
        )


class _Groups(NamedTuple):
    group: np.ndarray  # int [node]
    place: np.ndarray  # int [node]


def build_exchange(description: Exchange | str, topology: AbstractTopology) -> AbstractExchange:
    """The exchange on a network. Raises `ExchangeError` where it does not suit the network."""
    described = exchange_of(description) if isinstance(description, str) else description
    match described:
        case Gather():
            _check_route(described, topology)
            return GatherExchange(described)
        case ReduceScatter():
            return ReduceScatterExchange()
    groups = _groups(described, topology)
    successor = np.empty_like(groups.group)
    for index in range(described.count):
        order = _ring(topology, np.flatnonzero(groups.group == index))
        successor[order] = np.roll(order, -1)
    arrays = (jnp.asarray(array.astype(np.int32)) for array in (groups.group, successor, groups.place))
    return RingExchange(*arrays, topology.num_nodes // described.count, described)


def _check_route(gather: Gather, topology: AbstractTopology) -> None:
    if gather.route in ("cross_tree", "split_tree") and not isinstance(topology, Mesh):
        raise ExchangeError(
            f"exchange {gather.name} needs a mesh, whose paths can take either direction first, not a "
            f"{type(topology).__name__}; use {gather.home}_tree or {gather.home}"
        )


def _groups(rings: Rings, topology: AbstractTopology) -> _Groups:
    nodes = topology.num_nodes
    if len(rings.groups) == 2:
        if not isinstance(topology, Mesh):
            raise ExchangeError(
                f"exchange {rings.name} cuts a mesh into rectangles, and the network is a {type(topology).__name__}; "
                f"use rings_{rings.count}"
            )
        try:
            group = cut_blocks(topology.shape, (rings.groups[0], rings.groups[1]))
        except ValueError as error:
            raise ExchangeError(f"exchange {rings.name}: {error}") from None
    elif nodes % rings.count:
        legal = ", ".join(str(count) for count in range(1, nodes + 1) if nodes % count == 0)
        raise ExchangeError(f"exchange {rings.name} needs equal groups of {nodes} nodes; use one of {legal}")
    else:
        group = np.arange(nodes) // (nodes // rings.count)
    place = np.empty_like(group)
    for index in range(rings.count):
        place[group == index] = np.arange(nodes // rings.count)
    return _Groups(group, place)


def _ring(topology: AbstractTopology, nodes: np.ndarray) -> np.ndarray:
    """The nodes of a group in ring order: neighbours on a mesh where they have such a cycle, else by number."""
    if isinstance(topology, Mesh) and _is_rectangle(topology.shape, nodes):
        return ring_order(topology.shape, nodes)
    return nodes


def _is_rectangle(shape: tuple[int, int], nodes: np.ndarray) -> bool:
    x, y = np.unravel_index(nodes, shape)
    return len(nodes) == len(np.unique(x)) * len(np.unique(y))
