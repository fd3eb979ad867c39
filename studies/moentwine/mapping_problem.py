"""Communication time of a mapping of devices to groups: exact for a mapping, differentiable for a relaxed one.

A mapping gives every device a slot: a group, and a place on the group's ring. The devices of equal place are a full
token domain. Relaxed, a device has a weight in every slot; weights of a device and of a slot sum to 1.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from layouts import token_communication

from jaxmoe.hardware import AbstractTopology, TopologyError
from jaxmoe.network import Congestion, Counts, OneByOne, Uncongested, path_sums
from jaxmoe.network.time_models import AbstractTimeModel
from jaxmoe.network.token_communication import FetchExchange
from jaxmoe.placement.token_layout import TokenLayout, custom_layout
from jaxmoe.relax import AbstractReduction, HardMax, as_number

Places = Float[Array, "node group place"]


class MappingProblem(eqx.Module):
    """Communication of a layer on a mesh, to be made short by a mapping.

    `counts` are vectors that every device gets of the tokens of each group, `tokens` those of a group. By moentwine
    Eq. 1, or `congested`: under the congestion model with chunks of `chunk_bytes`.
    """

    topology: AbstractTopology
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

    @property
    def grid(self) -> tuple[int, int]:
        """Sides of the mesh. Raises `TopologyError` for a network that is none."""
        if self.topology.grid is None:
            raise TopologyError(f"groups of tokens are mapped to a mesh, not a {type(self.topology).__name__}")
        return self.topology.grid

    def cost(self, places: Places, reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of all-reduce, dispatch and combine; devices fetch from their own domain.

        Of an all-reduce there are 2 (R - 1) steps of all rings at once, half of each part either way round. Dispatch
        is combine sent back, over links reversed.
        """
        topology, combined = self.topology, self._combined(places)
        networks, sent = [topology, topology.reversed()], [combined, combined]
        members = self.shape[1]
        steps = 2 * (members - 1)
        if not self.congested:
            seconds = _at_once(OneByOne(), networks, sent, reduction).sum()
            return seconds + steps * self._longest_step(places, reduction) if steps else seconds
        if steps:
            networks, sent = [topology, *networks], [self._step(places), *sent]
        seconds = _at_once(Congestion(self.chunk_bytes), networks, sent, reduction)
        return steps * seconds[0] + seconds[1:].sum() if steps else seconds.sum()

    def _combined(self, places: Places) -> Float[Array, "node node2"]:
        """Bytes that devices return to where they fetched tokens."""
        groups = self.counts.shape[0]
        domain = places.sum(axis=1)
        fetching = FetchExchange(jnp.arange(groups), places.sum(axis=2), domain @ domain.T, groups)
        return self.vector_bytes * fetching(Counts(self.counts, jnp.zeros((groups, 1)))).traffic[0]

    @property
    def _part(self) -> Float[Array, ""]:
        """Bytes that a member sends one way round in a step."""
        members = self.shape[1]
        return self.tokens * self.vector_bytes / members / (2 if members > 2 else 1)

    def _step(self, places: Places) -> Float[Array, "node node2"]:
        """Bytes of one step of all rings."""
        here, there = _steps(places)
        traffic = self._part * here @ there.T
        return traffic + traffic.T if self.shape[1] > 2 else traffic

    def _longest_step(self, places: Places, reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of the longest way to the next member, by Eq. 1."""
        here, there = _steps(places)
        slowness = path_sums(self.topology, 1 / self.topology.link_rate)
        seconds = self._part * slowness + path_sums(self.topology, self.topology.link_latency)
        return reduction(jnp.sum(here * (seconds @ there), axis=0))

    def places_of(self, order: Int[Array, " slot"]) -> Places:
        """The exact weights of a mapping that names the device of every slot."""
        nodes = order.shape[0]
        return jax.nn.one_hot(order, nodes, dtype=self.counts.dtype).T.reshape(nodes, *self.shape)

    def layout(self, order: Int[np.ndarray, " slot"]) -> TokenLayout:
        """The token layout of a mapping."""
        return custom_layout(self.grid, np.asarray(order).reshape(self.shape), name="tuned")


def _steps(places: Places) -> tuple[Float[Array, "node slot"], Float[Array, "node slot"]]:
    """The member of every slot, and the next one of its ring."""
    here, there = (each.reshape(len(places), -1) for each in (places, jnp.roll(places, -1, axis=2)))
    return here, there


def _at_once(
    model: AbstractTimeModel,
    networks: Sequence[AbstractTopology],
    traffic: Sequence[Float[Array, "node node2"]],
    reduction: AbstractReduction,
) -> Float[Array, " stage"]:
    """Seconds of every stage. One program for all: most of a short search is compiling."""
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *networks)
    return jax.vmap(lambda network, sent: model(network, sent).total(reduction))(stacked, jnp.stack(traffic))


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
