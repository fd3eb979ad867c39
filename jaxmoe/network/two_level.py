"""An exchange of two levels, as DeepEP's normal kernels do it: one copy to a group of nodes, and on inside it."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.exchange import AbstractExchange, Label
from jaxmoe.network.flows import Flows, Phases
from jaxmoe.network.visits import Visits, homes
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.relax import as_weights


class TwoLevelExchange(AbstractExchange):
    """Results of a token meet in each group that it visits, at the node of its home's place there; then at its home.

    Groups are of successive nodes, such as the clusters of a machine. Dispatch is the mirror: one vector to each group,
    which forwards it. The levels are carried out one after the other.
    """

    group: Int[Array, " node"]
    place: Int[Array, " node"]  # of a node in its group
    called: Label = eqx.field(static=True, default=Label("two_level"))

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "TwoLevelExchange":
        groups, nodes = int(name.rsplit("_", 1)[1]), topology.num_nodes
        if nodes % groups:
            fits = ", ".join(str(count) for count in range(1, nodes + 1) if nodes % count == 0)
            raise ExchangeError(
                f"exchange {name} makes {groups} equal groups of {nodes} nodes, which cannot be; use {fits} groups"
            )
        with jax.ensure_compile_time_eval():  # these are constants, while others trace
            group, place = (jnp.asarray(part, jnp.int32) for part in np.divmod(np.arange(nodes), nodes // groups))
            return cls(group, place, Label(name))

    @property
    def name(self) -> str:
        return str(self.called)

    @property
    def returns_home(self) -> bool:
        return True

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        nodes = self.group.shape[0]
        home = as_weights(homes("token_home", topology, visits), nodes, visits.visited.dtype)
        home = home * visits.weight[:, None]
        of_place = jax.ops.segment_sum(home.T, self.place, nodes)  # [place, token]
        inside = (of_place @ visits.visited).T[:, self.place]  # from a node to that of a place
        visiting = jnp.maximum(jax.ops.segment_max(visits.visited.T, self.group, nodes), 0)  # [group, token]
        outside = (visiting @ home)[self.group]  # from a group to a home
        alike = self.group[:, None] == self.group
        rails = (self.place[:, None] == self.place) & ~alike
        return (_sent(inside * alike),), (_sent(outside * rails),)


def _sent(vectors: Float[Array, "node node2"]) -> Flows:
    """Vectors from node to node, each a message of its own."""
    amount = vectors.sum(axis=1)
    parts = vectors / jnp.maximum(amount, 1e-9)[:, None]
    return Flows(jnp.eye(len(amount), dtype=vectors.dtype), parts, amount, messages=vectors)
