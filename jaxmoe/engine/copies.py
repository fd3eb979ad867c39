"""A layer from counts and copies of experts: who holds which, and how an engine picks among them.

For tuning: choices of every expert in a batch, not tokens. Every choice is a vector of its own on the network, whose
times are those of the layer model's own time model; tokens live on ranks in given parts. Copies may be relaxed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.engine.counts import copy_work
from jaxmoe.engine.demand import Loads, Matrix
from jaxmoe.engine.layer import Layer
from jaxmoe.engine.price import price
from jaxmoe.engine.stage import Stage, chained
from jaxmoe.engine.times import LayerTime
from jaxmoe.network import link_loads
from jaxmoe.placement.replica_choice import ReplicaChoice, choice_of, ranked_distance, serving_parts
from jaxmoe.relax import AbstractReduction, HardMax


class ReplicaModel(eqx.Module):
    """A layer on a machine, as a function of which node holds copies of which expert.

    `origin` is the part of all tokens that lives at every rank; it sums to 1.
    """

    layer: Layer
    origin: Float[Array, " node"]
    tier: Int[Array, "node node2"]  # places of distances in hops, from the nearest on
    tiers: int = eqx.field(static=True)
    choice: ReplicaChoice = eqx.field(static=True)

    def __call__(
        self,
        held: Float[Array, "expert node"],
        loads: Float[Array, "batch expert"],
        reduction: AbstractReduction | None = None,
    ) -> LayerTime:
        """Times of batches, leaves [batch, ...]; `loads` counts the tokens that choose each expert.

        `held` counts the copies of every expert on every node. Times are exact without a relaxed `reduction`.
        """
        reduction = HardMax() if reduction is None else reduction
        # [expert, source, node]: the part of all choices of an expert
        parts = serving_parts(held, self.tier, self.tiers, self.choice) * self.origin[:, None]
        served, present = parts.sum(axis=1), jnp.minimum(held, 1)

        def batch(loads: Float[Array, " expert"]) -> LayerTime:
            back = jnp.einsum("e,esd->ds", loads, parts)  # vectors of combine
            return self._priced(back, loads[:, None] * served, present, reduction)

        return jax.vmap(batch)(loads)

    def _priced(
        self,
        back: Float[Array, "node source"],
        rows: Float[Array, "expert node"],
        present: Float[Array, "expert node"],
        reduction: AbstractReduction,
    ) -> LayerTime:
        layer, costs = self.layer, self.layer.costs
        stages = (
            Stage("dispatch", Matrix(back * costs.dispatch_bytes, layer.time_model, mirrored=True), split="even"),
            Stage("compute", copy_work(costs, rows, present), split="even"),
            Stage("combine", Matrix(back * costs.combine_bytes, layer.time_model), split="even"),
        )
        return price(layer.machine, layer.schedule, chained(stages), reduction)

    def moving(
        self,
        held: Float[Array, "expert node"],
        before: Float[Array, "expert node"],
        reduction: AbstractReduction | None = None,
    ) -> Float[Array, ""]:
        """Seconds until all copies that were not there `before` have come from the nearest that was, s.

        Weights have the network to themselves; the busiest link counts.
        """
        reduction = HardMax() if reduction is None else reduction
        topology = self.layer.machine.topology
        # Links and end points of the way there; among equally near copies the lowest-numbered.
        nearest = jnp.argmin(jnp.where(before[:, :, None] > 0, self.tier, self.tiers), axis=1)  # [expert, node]
        new = jnp.minimum(held, 1) * (before <= 0)
        nodes = jnp.arange(held.shape[1])
        traffic = jnp.zeros((len(nodes), len(nodes)), held.dtype)
        traffic = traffic.at[nearest, jnp.broadcast_to(nodes, nearest.shape)].add(new)
        carried = link_loads(topology, traffic * self.layer.costs.expert_bytes)
        return Loads(carried, jnp.zeros(())).usage(self.layer.machine, reduction).seconds


def replica_model(layer: Layer, choice: str, origin: Float[np.ndarray, " node"] | None = None) -> ReplicaModel:
    """The model of a layer whose tokens live on all ranks alike, or as `origin` says, in any unit.

    Raises `PlanError` for an unknown choice, and `ValueError` for origins that are not of the machine's nodes.
    """
    rule = choice_of(choice)
    nodes = layer.machine.num_nodes
    lives = np.ones(nodes) if origin is None else np.asarray(origin, float)
    if lives.shape != (nodes,) or (lives < 0).any() or not lives.sum() > 0:
        raise ValueError(f"origin has the shape {lives.shape}, expected parts of tokens on each of {nodes} ranks")
    tier, tiers = ranked_distance(np.asarray(layer.machine.topology.hop_counts()))
    parts = jnp.asarray(lives / lives.sum(), jnp.float32)
    return ReplicaModel(layer, parts, jnp.asarray(tier, jnp.int32), tiers, rule)
