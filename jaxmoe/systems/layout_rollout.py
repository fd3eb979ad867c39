"""Token layouts rolled out: plans with tokens at homes over steps, with a balancer or with experts in slices."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine import Decisions, LayerModel, LayerTime
from jaxmoe.engine.counts import copies_of, excess_over_mean, node_loads
from jaxmoe.placement.slots import EMPTY
from jaxmoe.policies.balancing import Balanced, Balancer
from jaxmoe.policies.forecast import MovingAverage
from jaxmoe.traces import Batch


@eqx.filter_jit
def of_share(
    model: LayerModel, share: Float[Array, "expert node"], steps: Batch, homes: Int[Array, " token"]
) -> LayerTime:
    """The same share in all layers and steps, whose leaves are [step, layer, ...]: times [step, layer]."""
    one = jax.vmap(lambda batch: model.time(Decisions(share, source=homes), batch))
    return jax.lax.map(one, steps)


@eqx.filter_jit
def of_balancer(
    balancer: Balancer, model: LayerModel, steps: Batch, homes: Int[Array, " token"]
) -> tuple[LayerTime, Balanced, Float[Array, "step layer"]]:
    """Times [step, layer] of steps, leaves [step, layer, ...], what was decided, and the excess of loads over mean."""
    experts = _experts_of(balancer)

    def of_layer(slots: Int[Array, "node slot"], batch: Batch) -> LayerTime:
        return model.time(Decisions(_share(slots, experts), source=homes), batch)

    def step(carry: tuple[Any, Array], batch: Batch):
        state, idle = carry
        loads = jax.vmap(lambda one: _loads(one, experts))(batch)
        state, decided = balancer.step(model, state, loads, idle)
        times = jax.vmap(of_layer)(decided.slots, batch)
        idle = idle if balancer.windows is None else balancer.windows.idle(times)
        moved = decided.experts_moved
        migration = decided.seconds * moved / jnp.maximum(moved.sum(), 1)
        stages = times.stages | {"migration": migration}
        charged = LayerTime(stages, times.busy, times.total + migration, times.energy)
        excess = excess_over_mean(jax.vmap(node_loads)(decided.slots, loads))
        return (state, idle), (charged, decided, excess)

    start = balancer.init(model.machine), jnp.zeros(model.machine.topology.num_links)
    return jax.lax.scan(step, start, steps)[1]


def _experts_of(balancer: Balancer) -> int:
    """Experts of a layer, of which its forecast knows."""
    assert isinstance(balancer.forecast, MovingAverage)
    return balancer.forecast.frequency.shape[-1]


def _share(slots: Int[Array, "node slot"], experts: int) -> Float[Array, "expert node"]:
    """Every copy of an expert serves alike."""
    each = 1 / jnp.maximum(copies_of(slots, experts), 1)
    node = jnp.arange(slots.shape[0])[:, None]
    held = jnp.zeros((experts + 1, slots.shape[0])).at[jnp.where(slots == EMPTY, experts, slots), node].add(1)
    return held[:experts] * each[:, None]


def _loads(batch: Batch, experts: int) -> Float[Array, " expert"]:
    """Choices of every expert."""
    chosen = jnp.where(batch.experts < 0, experts, batch.experts)
    counted = jnp.zeros(experts + 1).at[chosen].add(batch.weight[:, None])
    return counted[:experts]
