"""Plans that no system runs: exchanges, schedules, derivatives, bounds, and what stands beside experts."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config.build import build_even_parts
from jaxmoe.engine import Decisions, Layer, LayerTime, Metadata, Movement, evaluate, grouped_attention, schedule_of
from jaxmoe.network.token_communication import all_reduce_rounds, closing_rounds
from jaxmoe.placement.token_layout import token_layout
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

from ..store import Arrays, named
from .figures import figures_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "studies" / "placement_tuning"))
from exchange_bound import exchange_bound

sys.path.pop(0)


def price_plans(model: Layer, shares: np.ndarray, exchange: Any, batches: Batch) -> Arrays:
    """Plans [plan, layer, expert, node] under one exchange, on batches [layer, batch, ...] whose equal tokens merge."""
    plans, layers, experts, _ = shares.shape
    merged = model.merged(batches, experts, exchange)
    many = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * plans), merged)
    rows = jnp.asarray(shares.reshape(plans * layers, *shares.shape[2:]), jnp.float32)
    time = evaluate(model, rows, many, exchange).as_numpy()
    return figures_of(jax.tree.map(lambda leaf: leaf.reshape(plans, layers, *leaf.shape[1:]), time))


@eqx.filter_jit
def _with_movements(model: Layer, share: Any, batch: Batch, destination: Any) -> dict[str, LayerTime]:
    moved = {"alone": (), "hidden": (Movement(destination, True),), "charged": (Movement(destination),)}
    return {name: model.time(Decisions(share, movements=each), batch) for name, each in moved.items()}


def price_schedules(ready: Any, names: tuple[str, ...], share: np.ndarray, destination: np.ndarray, batch: Batch):
    """One layer with attention, its all-reduce and metadata beside its experts, by schedule and movement."""
    model, scenario = ready.inputs.model, ready.inputs.scenario
    layout = token_layout("er", model.machine.topology.shape, 4)
    attention = grouped_attention(
        ready.inputs.moe,
        layout.tp,
        layout.num_groups,
        float(scenario.workload.context_tokens),
        all_reduce_rounds(layout, True),
        bytes_per_element=2.0,
        weight_bytes_per_element=1.0,
        closing=closing_rounds(layout, True),
    )
    given = tuple(jnp.asarray(each, jnp.float32) for each in (share, destination))
    found: Arrays = {}
    for name in names:
        extras = (attention, Metadata(jnp.asarray(64.0)))
        own = replace(model, schedule=schedule_of(name), extras=extras)
        for kind, time in _with_movements(own, given[0], batch, given[1]).items():
            found |= named(figures_of(time), f"{name}/{kind}/")
    return found


def slopes(model: Layer, share: np.ndarray, batch: Batch) -> Arrays:
    """The total of a relaxed layer, and its derivatives by links, dies and shares, in double precision."""
    with jax.enable_x64(True):
        wide = partial(
            jax.tree.map, lambda leaf: jnp.asarray(leaf, float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        )
        numbers, rest = eqx.partition((model, batch), eqx.is_array)
        model, batch = eqx.combine(wide(numbers), rest)

        @jax.jit
        def total(bandwidth: Any, flops: Any, share: Any) -> Any:
            places = (model.machine.topology.link_bandwidth, model.machine.die.flops)
            assert places[0].shape == bandwidth.shape
            changed = eqx.tree_at(
                lambda m: (m.machine.topology.link_bandwidth, m.machine.die.flops), model, (bandwidth, flops)
            )
            return changed(share, batch, None, SmoothMax(0.05), SoftSupport(0.1)).total

        at = (model.machine.topology.link_bandwidth, model.machine.die.flops, jnp.asarray(share, float))
        value, each = jax.value_and_grad(total, argnums=(0, 1, 2))(*at)
    return {"total": np.asarray(value)} | dict(zip(("bandwidth", "flops", "share"), map(np.asarray, each), strict=True))


def even_parts(ready: Any, tokens: tuple[float, ...]) -> Arrays:
    """Seconds beside routed experts of a step of so many tokens."""
    parts = build_even_parts(ready.inputs.scenario)
    seconds = [parts(jnp.asarray(count)) for count in tokens]
    return {name: np.array([float(getattr(each, name)) for each in seconds]) for name in seconds[0]._fields}


def bounds(ready: Any, share: np.ndarray, batches: Batch) -> Arrays:
    """Times that nothing beats: of any plan, and of any exchange of this one."""
    inputs = ready.inputs
    problem = PlacementProblem(inputs.model, inputs.trace, inputs.scenario.workload.batch_tokens)
    of_layer = [jax.tree.map(lambda leaf, at=row: leaf[at], batches) for row in range(len(share))]
    exchange = [exchange_bound(inputs.model, plan, each) for plan, each in zip(share, of_layer, strict=True)]
    return {"any_plan": lower_bound(problem, batches), "any_exchange": np.stack(exchange)}
