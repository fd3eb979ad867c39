"""A problem that is tuned in a second: six experts, two layers, four nodes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from oracles import cases

from jaxmoe.engine import Layer
from jaxmoe.hardware import node_memory
from jaxmoe.traces import GatingTrace, synthetic_trace
from jaxmoe.tune import PlacementProblem, TunerSettings

SHAPE, NODES, EXPERTS, LAYERS, TOP_K, TOKENS = (2, 2), 4, 6, 2, 2, 24  # more kinds of token than tokens
SETTINGS = TunerSettings(
    restarts=2, steps=50, refine_steps=200, refine_chains=2, refine_batches=8, hybrid_cuts=0, seed=5
)


def small_trace(seed: int = 0) -> GatingTrace:
    """Skewed choices, so that it matters who lives where."""
    return synthetic_trace(600, range(LAYERS), EXPERTS, TOP_K, skew=1.5, coactivation=0.0, reuse=0.0, seed=seed)


def small_model(
    seed: int = 0,
    room: float | np.ndarray = np.inf,
    link_factor: float = 1.0,
    flops_factor: float = 1.0,
    message_factor: float = 1.0,
    rule: str = "lowest_host",
) -> Layer:
    """A machine whose nodes and links all differ; `room` is in experts of one layer per node."""
    machine = cases.random_machine(np.random.default_rng(seed), SHAPE)
    machine.link_bandwidth *= link_factor
    machine.flops *= flops_factor
    costs = cases.Costs(8192.0 * message_factor, 3e6, 5e6, 512.0, dispatch_bytes=8192.0 * message_factor)
    capacity = np.broadcast_to(np.asarray(room) * costs.expert_bytes * LAYERS, NODES)
    model = cases.layer_model(machine, rule=rule, costs=costs)
    memory = node_memory(None, jnp.asarray(capacity, jnp.float32))
    return dataclasses.replace(model, machine=dataclasses.replace(model.machine, memory=memory))


EXCHANGES = ("ring_both_ways",)  # beside the model's own: few, so that few functions compile


def small_problem(
    trace_seed: int = 0,
    p95_weight: float = 0.0,
    tokens: int = TOKENS,
    exchanges: tuple[str, ...] = EXCHANGES,
    **machine,
) -> PlacementProblem:
    """The problem of placing the experts of `small_trace` on `small_model`."""
    trace = small_trace(trace_seed)
    return PlacementProblem(small_model(**machine), trace, tokens, p95_weight=p95_weight, exchanges=exchanges)


def random_shares(rng: np.random.Generator, *candidates: int, hosts: int = 3) -> np.ndarray:
    """Legal plans [layer, *candidates, expert, node]."""
    count = LAYERS * int(np.prod(candidates))
    plans = [cases.random_share(rng, EXPERTS, NODES, hosts) for _ in range(count)]
    return np.stack(plans).reshape(LAYERS, *candidates, EXPERTS, NODES).astype(np.float32)
