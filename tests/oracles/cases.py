"""Random small machines, plans and batches, for the loops and for the model alike."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.engine import Layer, LayerCosts
from jaxmoe.hardware import AbstractTopology, Die, Machine, node_memory
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import (
    AbstractTimeModel,
    Congestion,
    Flows,
    StageTime,
    Uncongested,
    alpha_beta,
    build_exchange,
)
from jaxmoe.traces.batches import Batch
from oracles.arrays import floats
from oracles.layer import Costs, Tokens
from oracles.network import NumpyMachine

COSTS = Costs(
    combine_bytes=8192.0, dispatch_bytes=4200.0, expert_bytes=3e6, flops_per_token_expert=5e6, chunk_bytes=512.0
)
CHUNK = 3e4
TIME_MODELS: dict[str, Callable[[AbstractTopology], AbstractTimeModel]] = {
    "stored": lambda _: Congestion(jnp.asarray(CHUNK)),
    "cut_through": lambda _: Congestion(jnp.asarray(CHUNK), cut_through=True),
    "uncongested": lambda _: Uncongested(),
    "alpha_beta": alpha_beta,
    "pipelined": lambda topology: alpha_beta(topology, pipelined=True),
}


def random_machine(rng: np.random.Generator, shape: tuple[int, int], ports=False, memory=False) -> NumpyMachine:
    """Every link and node has its own numbers; compute and communication take about as long."""
    nodes, links = shape[0] * shape[1], num_links(shape)
    return NumpyMachine(
        shape=shape,
        link_bandwidth=rng.uniform(1e9, 4e9, links),
        link_latency=rng.uniform(1e-8, 1e-6, links),
        flops=rng.uniform(1e12, 3e12, nodes),
        injection=rng.uniform(2e8, 4e9, nodes) if ports else None,
        ejection=rng.uniform(2e8, 4e9, nodes) if ports else None,
        memory_bandwidth=rng.uniform(1e10, 3e11, nodes) if memory else None,
    )


def random_share(rng: np.random.Generator, experts: int, nodes: int, hosts: int = 3) -> np.ndarray:
    """One to `hosts` hosts per expert, none with less than a tenth."""
    share = np.zeros((experts, nodes))
    for expert in range(experts):
        chosen = rng.choice(nodes, rng.integers(1, hosts + 1), replace=False)
        part = rng.uniform(0.5, 1.5, chosen.size)
        share[expert, chosen] = part / part.sum()
    return share


def random_tokens(rng: np.random.Generator, tokens: int, experts: int, top_k: int, missing=False) -> Tokens:
    """Tokens that choose different experts; where `missing`, some lack any choice, or all of them."""
    chosen = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)])
    token_draw = rng.random(tokens)
    if missing:
        chosen[rng.random(chosen.shape) < 0.25] = -1
    return Tokens(chosen, token_draw, rng.random((tokens, top_k)), rng.integers(1, 4, tokens).astype(float))


def as_machine(machine: NumpyMachine) -> Machine:
    """The machine as the model sees it."""
    bandwidth = None if machine.memory_bandwidth is None else floats(machine.memory_bandwidth)
    return Machine(machine.topology, Die(floats(machine.flops)), node_memory(bandwidth))


def layer_costs(costs: Costs = COSTS) -> LayerCosts:
    """The costs as the model sees them: those of an expert of 44 columns, computed in three products."""
    numbers = (costs.combine_bytes, costs.dispatch_bytes, costs.expert_bytes, costs.flops_per_token_expert, 44.0, 3.0)
    return LayerCosts(*map(floats, numbers))


def model_on(
    machine: Machine, mode: str = "sharded", rule: str = "lowest_host", costs: Costs = COSTS, **parts
) -> Layer:
    """The model of one layer on any machine, with the exchange of a name."""
    chunks = Congestion(floats(costs.chunk_bytes))
    exchange = build_exchange(rule, machine.topology)
    return Layer(machine, layer_costs(costs), chunks, exchange, mode, **parts)


def layer_model(
    machine: NumpyMachine, mode: str = "sharded", rule: str = "lowest_host", costs: Costs = COSTS, **parts
) -> Layer:
    """The model of one layer on a mesh."""
    return model_on(as_machine(machine), mode, rule, costs, **parts)


def batch(tokens: Tokens) -> Batch:
    """The batch as the model sees it."""
    return Batch(
        experts=jax.device_put(tokens.experts.astype(np.int32)),
        token_draw=floats(tokens.token_draw),
        draw=floats(tokens.draw),
        weight=floats(tokens.weight),
        source=None if tokens.source is None else jax.device_put(np.asarray(tokens.source, np.int32)),
    )


def pair_flows(messages: np.ndarray, rounds: float = 1.0, vectors: np.ndarray | float = 1.0) -> Flows:
    """Messages [source, destination] as one flow per destination; those to it are of `vectors` hidden vectors."""
    sizes = np.broadcast_to(vectors, len(messages))
    numbers = map(floats, (messages.T, np.eye(len(messages)), sizes))
    return Flows(*numbers, rounds=floats(rounds))


def congestion(topology, flows: Flows, vector_bytes, chunk_bytes) -> StageTime:
    """The congestion model's time of flows under store-and-forward."""
    return Congestion(chunk_bytes).of_flows(topology, flows, vector_bytes)


def mirrored_congestion(topology, flows: Flows, vector_bytes, chunk_bytes) -> StageTime:
    """The same for the flows sent back."""
    return Congestion(chunk_bytes).of_mirrored(topology, flows, vector_bytes)
