"""Exchanges turn visits of tokens into flows of combine; dispatch mirrors them."""

import abc
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.flows import Flows, Phases, Rounds
from jaxmoe.network.visits import Visits, homes
from jaxmoe.placement.exchange import (
    EXCHANGES,
    Exchange,
    ExchangeError,
    Gather,
    LeastCongested,
    PricedLinks,
    ReduceScatter,
    Rings,
    exchange_of,
)
from jaxmoe.placement.strategies import groups_of, ring_orders
from jaxmoe.relax import added_up

OWN_NAME = "own"  # of the exchange of a model, where nothing else tells it


class MergeKey(NamedTuple):
    """Tokens that chose the same experts are alike to an exchange, under conditions.

    `by_slot`: if their draws name the same of their choices. `turns`: if they are of one turn, of so many that tokens
    take in their order. Where `weights_last`, how many alike there are comes in after all else, so that batches share
    the rest.
    """

    by_slot: bool = False
    turns: int = 1
    weights_last: bool = False


class Label(str):
    """A name for people and for lookups. All labels are equal, so that functions compile once for all of them."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return 0


class AbstractExchange(eqx.Module):
    """Turns visits into flows of hidden vectors: combine; dispatch mirrors it.

    A user's own is registered in `jaxmoe.placement.exchange.EXCHANGES`, and how the simulator carries it out in
    `jaxmoe.des.exchanges.SIMULATED`. Properties say what others have to know of it. By default an exchange is
    `complete`; one that leaves messages out has to say so. All other defaults are safe for any exchange.
    """

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "AbstractExchange":
        """The exchange of this name on a network. Raises `ExchangeError` where it does not suit the network.

        A family of exchanges, registered under a template, reads its parameters from the name.
        """
        return cls()

    @property
    def name(self) -> str:
        """The name that its class is registered under; a class that has several names overrides it."""
        return EXCHANGES.name_of(type(self)) or OWN_NAME

    @property
    def described(self) -> Exchange | str:
        """All that another, such as the simulator, needs of this exchange: its name, or its table where it has one."""
        return self.name

    @property
    def merges(self) -> bool:
        """Whether parts of a token's result may be added up on their way, in routers or nodes."""
        return not self.unicast

    @property
    def unicast(self) -> bool:
        """Whether each visited node sends a full vector of its own to one node: the token's home or a visited node."""
        return False

    @property
    def complete(self) -> bool:
        """Whether the exchange counts all messages that nodes have to send each other."""
        return True

    @property
    def note(self) -> str:
        """Remark shown with results of this exchange, such as the traffic that it does not count; empty if none."""
        return ""

    @property
    def groups(self) -> int:
        """Number of equal groups of nodes. If a token visits any node of a group, all nodes of the group take part.

        0: only visited nodes take part. Tuning tries an exchange of groups only on plans that fill the groups evenly.
        """
        return 0

    @property
    def returns_home(self) -> bool:
        """Whether results come back to where tokens live."""
        return False

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        """Of what other tokens it has to know at run time: none, those of the last step, or those of this batch."""
        return "batch"

    def alike(self, topology: AbstractTopology) -> MergeKey | None:
        """When tokens of the same experts are alike to it, so that they need be counted once; `None`: never."""
        return None

    def choices_in_turn(self, tokens: int | Float[Array, ""]) -> int | Float[Array, ""]:
        """How many choices so many tokens take one after another, each knowing those before; by default none."""
        return 0

    def in_rounds(self, tokens: int) -> "AbstractExchange":
        """The exchange with so many tokens, or more, that choose without knowing of each other: a quicker stand-in."""
        return self

    def deciding(self, topology: AbstractTopology, visits: Visits) -> Phases | Rounds | None:
        """Traffic before dispatch by which nodes learn what they have to know, B; `None`: it costs nothing."""
        return None

    @abc.abstractmethod
    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases | Rounds:
        """The flows of combine, or its traffic in rounds, in hidden vectors."""


class DescribedExchange(AbstractExchange):
    """An exchange of which a description says what it is called, where results meet, and what it has to know."""

    description: eqx.AbstractVar[Gather | LeastCongested]

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def unicast(self) -> bool:
        return self.description.route == "unicast"

    @property
    def returns_home(self) -> bool:
        return self.description.returns_home

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return self.description.knows

    def choices_in_turn(self, tokens: int | Float[Array, ""]) -> int | Float[Array, ""]:
        return self.description.choices_in_turn(tokens)


class GatherExchange(DescribedExchange):
    """Every visited node brings one vector to the token's home, alone or along a tree."""

    description: Gather = eqx.field(static=True, default=Gather())

    def alike(self, topology: AbstractTopology) -> MergeKey | None:
        home = self.description.home
        if home not in ("lowest_host", "fewest_hops", "corner_host"):
            return None
        turns = len(topology.corners) if home == "corner_host" else 1
        return MergeKey(home == "lowest_host", turns, weights_last=not self.unicast)

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "GatherExchange":
        described = exchange_of(name)
        assert isinstance(described, Gather)
        _check_route(described, topology)
        return cls(described)

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        rule, route = self.description.home, self.description.route
        one = jnp.ones((), visits.visited.dtype)
        if route == "unicast" and rule == "lowest_host" and visits.named is not None:
            # Tokens with one home make one flow: mostly far fewer flows than tokens.
            messages = added_up(visits.visited * visits.weight[:, None], visits.named, len(visits.home))
            return ((Flows(messages, visits.home, one),),)
        home = homes(rule, topology, visits)
        if route == "unicast":
            return ((Flows(visits.visited, home, one, visits.weight),),)
        if route == "split_tree":
            return (tuple(Flows(visits.visited, home, one / 2, visits.weight, route=way) for way in BOTH_TREES),)
        return ((Flows(visits.visited, home, one, visits.weight, route=route),),)


BOTH_TREES: tuple[Literal["tree", "cross_tree"], ...] = ("tree", "cross_tree")


class ReduceScatterExchange(AbstractExchange):
    """Every visited node sends each of the others its part of the vector."""

    @property
    def name(self) -> str:
        return ReduceScatter().name

    @property
    def merges(self) -> bool:
        return False

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def alike(self, topology: AbstractTopology) -> MergeKey | None:
        return MergeKey()

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        visited = visits.visited
        spread = visited / jnp.maximum(visited.sum(axis=1, keepdims=True), 1e-9)
        sent = visited * visits.weight[:, None]
        return ((Flows(sent, spread, jnp.ones((), visited.dtype), messages=sent.T @ visited),),)


class RingExchange(AbstractExchange):
    """Ring reduce-scatter inside each of several equal groups of nodes, all at once; then between groups.

    Each of the R nodes of a ring sends 1/R of the vectors of the tokens that visit the ring, R - 1 times over. Eq. 4 of
    hd_moe is the limit of many nodes: 4 B h / BW instead of (R-1)/R of it. All fields are arrays: one
    compiled function serves all rings of a machine.
    """

    group: Int[Array, " node"]  # ring of a node
    successor: Int[Array, " node"]  # next node on the ring
    place: Int[Array, " node"]  # of a node in its group; nodes of equal place exchange slices
    size: Float[Array, ""]  # nodes of one ring
    both_ways: Float[Array, ""]  # 1: half of every part goes the other way round
    between: Float[Array, ""]  # 1: groups send each other slices
    called: Label = eqx.field(static=True, default=Label("ring"))

    @property
    def name(self) -> str:
        return str(self.called)

    @property
    def complete(self) -> bool:
        return float(self.between) > 0 or self.groups == 1

    @property
    def note(self) -> str:
        told = "rings inside groups as hd_moe counts them, without what the groups send each other"
        return "" if self.complete else told

    @property
    def groups(self) -> int:
        return self.group.shape[0] // int(self.size)

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def alike(self, topology: AbstractTopology) -> MergeKey | None:
        return MergeKey()

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "RingExchange":
        rings = exchange_of(name)
        assert isinstance(rings, Rings)
        successor, place = np.empty(topology.num_nodes), np.empty(topology.num_nodes)
        for order in ring_orders(rings, topology):
            successor[order], place[np.sort(order)] = np.roll(order, -1), np.arange(len(order))
        with jax.ensure_compile_time_eval():  # these are constants, and told of by properties, while others trace
            return cls(
                group=jnp.asarray(groups_of(rings, topology), jnp.int32),
                successor=jnp.asarray(successor, jnp.int32),
                place=jnp.asarray(place, jnp.int32),
                size=jnp.asarray(topology.num_nodes // rings.count, jnp.float32),
                both_ways=jnp.asarray(rings.both_ways, jnp.float32),
                between=jnp.asarray(rings.between and rings.count > 1, jnp.float32),
                called=Label(rings.name),
            )

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        nodes = self.group.shape[0]
        visiting = jax.ops.segment_max(visits.visited.T, self.group, nodes).T  # [token, group]
        visiting = jnp.maximum(visiting, 0)  # there are fewer groups than nodes
        around = self._around((visits.weight @ visiting)[self.group] / self.size)
        return (around,), (self._between(visiting, visits.weight),)

    def _around(self, vectors: Float[Array, " node"]) -> Flows:
        preceding = jnp.zeros_like(self.successor).at[self.successor].set(jnp.arange(len(vectors), dtype=jnp.int32))
        sending = jnp.diag((vectors > 0).astype(vectors.dtype))  # a ring that no token visits sends nothing
        back = self.both_ways * jnp.where(self.size > 2, 0.5, 0.0)  # a ring of two has but one way
        return Flows(
            jnp.concatenate([sending, sending * (back > 0)]),
            jnp.concatenate([self.successor, preceding]),
            jnp.concatenate([vectors * (1 - back), vectors * back]),
            chain=jnp.concatenate([preceding, self.successor + len(vectors)]),
            rounds=self.size - 1,
        )

    def _between(self, visiting: Float[Array, "token group"], weight: Float[Array, " token"]) -> Flows:
        """Slices of tokens that visit several groups, of which each keeps an equal part."""
        kept = visiting / jnp.maximum(visiting.sum(axis=1, keepdims=True), 1e-9)
        sent = visiting * weight[:, None]
        alike = self.between * (self.place[:, None] == self.place)
        vectors = (sent.T @ kept)[self.group][:, self.group] * alike / self.size
        amount = vectors.sum(axis=1)
        return Flows(
            source=jnp.eye(len(amount), dtype=weight.dtype),
            destination=vectors / jnp.maximum(amount, 1e-9)[:, None],
            vectors=amount,
            # Slices from one node to another go as one message.
            messages=jnp.minimum(sent.T @ visiting, 1)[self.group][:, self.group] * alike,
        )


def build_exchange(description: Exchange | str, topology: AbstractTopology) -> AbstractExchange:
    """The exchange on a network. Raises `ExchangeError` where it is not known or does not suit the network."""
    name = description if isinstance(description, str) else description.name
    exchange_of(name)  # raises where there is none
    entry = EXCHANGES[name]
    # A table of prices is no part of a name.
    made = getattr(entry, "build", entry)(description if isinstance(description, PricedLinks) else name, topology)
    if not isinstance(made, AbstractExchange):
        raise ExchangeError(
            f"exchange {name} is registered as what makes a {type(made).__name__}, expected an AbstractExchange; "
            "register a class of these, or a function of a name and a network that returns one"
        )
    return made


def _check_route(gather: Gather, topology: AbstractTopology) -> None:
    if gather.route in ("cross_tree", "split_tree") and topology.crossed() is None:
        raise ExchangeError(
            f"exchange {gather.name} needs a mesh, whose paths can take either direction first, not a "
            f"{type(topology).__name__}; use {gather.home}_tree or {gather.home}"
        )
