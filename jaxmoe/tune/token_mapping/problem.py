"""What a mapping of devices to groups costs: exact for a mapping, differentiable for a relaxed one.

A mapping gives every device a slot: a group, and a place on the group's ring. The devices of equal place are a full
token domain. Relaxed, a device has a weight in every slot; weights of a device and of a slot sum to 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import Mesh
from jaxmoe.network import Congestion, Counts, OneByOne, Uncongested, path_sums, token_communication
from jaxmoe.network.collectives import price_rounds
from jaxmoe.network.domains import FetchExchange, scaled
from jaxmoe.placement.tokens import TokenLayout, custom_layout
from jaxmoe.relax import AbstractReduction, HardMax, as_number

Places = Float[Array, "node group place"]


class MappingProblem(eqx.Module):
    """Communication of a layer on a mesh, to be made short by a mapping.

    `counts` are vectors that every device gets of the tokens of each group, `tokens` those of a group. By moentwine
    Eq. 1, or `congested`: under the congestion model with chunks of `chunk_bytes`.
    """

    topology: Mesh
    counts: Float[Array, "group node"]
    tokens: Float[Array, ""] = eqx.field(converter=as_number)
    vector_bytes: Float[Array, ""] = eqx.field(converter=as_number)
    chunk_bytes: Float[Array, ""] = eqx.field(converter=as_number, default=2048.0)
    congested: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and devices of each."""
        groups, nodes = self.counts.shape
        return groups, nodes // groups

    def cost(self, places: Places, reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of all-reduce, dispatch and combine."""
        return self.all_reduce(places, reduction) + self.exchange(places, reduction)

    def all_reduce(self, places: Places, reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of the all-reduce: 2 (R - 1) steps of all rings at once, half of each part either way round.

        By Eq. 1 a step takes as long as the longest way to the next member.
        """
        members = self.shape[1]
        if members == 1:
            return jnp.zeros(())
        ways = 2 if members > 2 else 1
        amount = self.tokens * self.vector_bytes / members / ways
        here, there = (each.reshape(len(places), -1) for each in (places, jnp.roll(places, -1, axis=2)))
        if self.congested:
            traffic = amount * here @ there.T
            step = self._congestion(self.topology, traffic + traffic.T if ways == 2 else traffic).total(reduction)
        else:
            slowness = path_sums(self.topology, 1 / (self.topology.link_bandwidth * self.topology.efficiency))
            seconds = amount * slowness + path_sums(self.topology, self.topology.link_latency)
            step = reduction(jnp.sum(here * (seconds @ there), axis=0))
        return 2 * (members - 1) * step

    @property
    def _congestion(self) -> Congestion:
        return Congestion(self.chunk_bytes)

    def exchange(self, places: Places, reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of dispatch and combine: devices fetch from their own domain."""
        groups = self.counts.shape[0]
        domain = places.sum(axis=1)
        fetching = FetchExchange(jnp.arange(groups), places.sum(axis=2), domain @ domain.T, groups)
        rounds = scaled(fetching(Counts(self.counts, jnp.zeros((groups, 1)))), self.vector_bytes)
        model = self._congestion if self.congested else OneByOne()
        ways = (price_rounds(model, self.topology, rounds, reduction, mirrored) for mirrored in (True, False))
        return sum((way.seconds for way in ways), jnp.zeros(()))

    def places_of(self, order: Int[Array, " slot"]) -> Places:
        """The exact weights of a mapping that names the device of every slot."""
        nodes = order.shape[0]
        return jax.nn.one_hot(order, nodes, dtype=self.counts.dtype).T.reshape(nodes, *self.shape)

    def layout(self, order: Int[np.ndarray, " slot"]) -> TokenLayout:
        """The token layout of a mapping."""
        return custom_layout(self.topology.shape, np.asarray(order).reshape(self.shape), name="tuned")


def exact_seconds(problem: MappingProblem, layout: TokenLayout) -> float:
    """Seconds of all-reduce, dispatch and combine of any layout."""
    congestion = Congestion(problem.chunk_bytes)
    models = (congestion, congestion) if problem.congested else (OneByOne(), Uncongested())
    communication = token_communication(layout, problem.topology, *models)
    stages = _priced(communication, problem)
    return float(sum(stages[name].seconds for name in ("all_reduce", "dispatch", "combine")))


@eqx.filter_jit
def _priced(communication, problem: MappingProblem):
    counts = Counts(problem.counts, jnp.zeros((problem.counts.shape[0], 1)))
    return communication(problem.topology, counts, problem.tokens, problem.vector_bytes, HardMax())
