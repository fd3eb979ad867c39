"""Slots and copies priced from how many tokens experts have; and balancers over iterations."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from oracles.stages import known_attention

from jaxmoe.config import build_layer_model
from jaxmoe.engine import LayerCosts, LayerTime, rollout, schedule_of
from jaxmoe.engine.copies import replica_model
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import wafers
from jaxmoe.methods.forecast import MovingAverage
from jaxmoe.methods.moentwine.balancing import Balancer, Eplb, KeepSlots, ShadowSlots, facts_alone, first_slots
from jaxmoe.methods.moentwine.gradient_slots import GradientSlots, hop_price
from jaxmoe.methods.moentwine.migration import Windows
from jaxmoe.placement.slots import copies_of_slots
from jaxmoe.placement.token_layout import links_inside_domains, token_layout

from ..store import Arrays
from .figures import figures_of

# Copies of experts, from loads.


def copies_model(scenario: Any, choice: str) -> Any:
    """The model of copies on a scenario's machine, whose tokens live on all ranks alike."""
    return replica_model(build_layer_model(scenario, "sharded"), choice)


def price_copies(model: Any, slots: np.ndarray, before: np.ndarray, loads: np.ndarray) -> Arrays:
    """Slots [layer, slot] for loads [layer, batch, expert], and moving to them from those before."""
    nodes, experts = model.layer.machine.num_nodes, loads.shape[2]
    held, first = (jnp.asarray(copies_of_slots(each, experts, nodes), jnp.float32) for each in (slots, before))

    @eqx.filter_jit
    def layers(held: Any, first: Any, loads: Any) -> tuple[LayerTime, Any]:
        return jax.lax.map(
            lambda given: (model(given[0], given[2]), model.moving(given[0], given[1])), (held, first, loads)
        )

    time, moving = layers(held, first, jnp.asarray(loads, jnp.float32))
    return figures_of(time) | {"moving": np.asarray(moving)}


# Slots on counts.

WAFER, DIES, LAYERS = (4, 4), 16, 3


def count_model(schedule: str) -> CountModel:
    """A small wafer with entwined rings, whose links are slow beside its dies."""
    topology = wafers(WAFER, (1, 1), 1e9, 1e-8, 1e9, 1e-8)
    memory = node_memory(jnp.full(DIES, 1e10), jnp.full(DIES, 1e6))
    machine = Machine(topology, Die(jnp.full(DIES, 1e12)), memory)
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 32.0, 5e3, 1e6, 128.0, 3.0)))
    parts = token_layout("er", WAFER, 4).parts
    before = known_attention(jnp.asarray(1e-5), jnp.asarray(2e-6), jnp.full(topology.num_links, 1e-6))
    paths = paths_of(topology, parts)
    return CountModel(machine, costs, jnp.asarray(parts), paths, before, schedule_of(schedule))


def price_counts(schedule: str, slots: np.ndarray, loads: np.ndarray) -> Arrays:
    """Slots [case, node, slot] for loads [case, expert], of all groups alike, or [case, group, expert]."""
    model = count_model(schedule)
    time = jax.jit(jax.vmap(model))(jnp.asarray(slots, jnp.int32), jnp.asarray(loads, jnp.float32))
    return figures_of(time)


def balance(name: str, invasive: bool, loads: np.ndarray) -> Arrays:
    """A balancer over loads [step, layer, expert]: times, moves, imbalance."""
    model = count_model("serial")
    distance = jnp.asarray(model.machine.topology.hop_counts(), jnp.float32)
    price = hop_price(model.machine, model.costs.expert_bytes)
    rules = {
        "none": KeepSlots,
        "eplb": Eplb,
        "greedy": lambda: ShadowSlots(distance, 1, "coldest"),
        "topology_aware": lambda: ShadowSlots(distance, 1, "nearest"),
        "gradient": lambda: GradientSlots(model, distance, jnp.asarray(10.0), price * (1.0 if invasive else 0.1), 1),
    }
    inside = links_inside_domains(token_layout("er", WAFER, 4), model.machine.topology.link_ends)
    balancer = Balancer(
        rule=rules[name](),
        forecast=MovingAverage(jnp.full((LAYERS, DIES), 1 / DIES), jnp.asarray(0.5)),
        start=jnp.asarray(first_slots(np.broadcast_to(np.eye(DIES), (LAYERS, DIES, DIES)), 1)),
        distance=distance,
        alpha=jnp.asarray(np.inf if name == "none" else 0.1, jnp.float32),
        beta=jnp.asarray(1.0),
        windows=None if invasive else Windows.alternating(inside),
        expert_bytes=model.costs.expert_bytes,
        experts=DIES,
    )
    ran = rollout(balancer, model, jnp.swapaxes(jnp.asarray(loads, jnp.float32), 0, 1), keep=facts_alone)
    facts = {name: np.asarray(fact) for name, fact in ran.kept.items()}
    whole = {name: facts.pop(name)[:, 0] for name in ("imbalance", "triggered", "needed")}  # of all layers
    waited = np.asarray(ran.time.stages["migration"]).sum(axis=1)
    return figures_of(ran.time) | facts | whole | {"seconds": waited}
