"""Random small machines, plans and batches, for the loops and for the model alike."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxmoe.hardware import AbstractTopology, Die, Machine, Mesh, node_memory
from jaxmoe.hardware.mesh import num_links
from jaxmoe.latency import LayerModel
from jaxmoe.network import (
    AbstractTimeModel,
    Congestion,
    FewestHops,
    Flows,
    LowestHost,
    StageTime,
    Uncongested,
    alpha_beta,
)
from jaxmoe.traces.batches import Batch
from oracles.layer import Costs, Tokens
from oracles.network import NumpyMachine

COSTS = Costs(message_bytes=8192.0, expert_bytes=3e6, flops_per_token_expert=5e6, chunk_bytes=512.0)
RULES = {"lowest": LowestHost, "fewest": FewestHops}
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
    """Tokens that choose different experts; where `missing`, the last choice of some is none."""
    chosen = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)])
    slot = rng.integers(top_k, size=tokens)
    if missing:
        chosen[(rng.random(tokens) < 0.4) & (slot < top_k - 1), -1] = -1
    return Tokens(chosen, slot, rng.random((tokens, top_k)), rng.integers(1, 4, tokens).astype(float))


def as_machine(machine: NumpyMachine) -> Machine:
    """The machine as the model sees it."""

    def array(values):
        return None if values is None else jnp.asarray(values, float)

    mesh = Mesh(
        array(machine.link_bandwidth),
        array(machine.link_latency),
        array(machine.injection),
        array(machine.ejection),
        shape=machine.shape,
    )
    return Machine(mesh, Die(array(machine.flops)), node_memory(array(machine.memory_bandwidth)))


def layer_model(machine: NumpyMachine, mode: str = "sharded", rule: str = "lowest", costs: Costs = COSTS) -> LayerModel:
    """The model of one layer on the machine."""
    numbers = (costs.message_bytes, costs.expert_bytes, costs.flops_per_token_expert)
    return LayerModel(
        as_machine(machine),
        *(jnp.asarray(n, float) for n in numbers),
        time_model=Congestion(jnp.asarray(costs.chunk_bytes, float)),
        exchange=RULES[rule](),
        mode=mode,
    )


def batch(tokens: Tokens) -> Batch:
    """The batch as the model sees it."""
    return Batch(
        experts=jnp.asarray(tokens.experts, jnp.int32),
        token_draw=jnp.asarray((tokens.gather_slot + 0.5) / tokens.experts.shape[1], jnp.float32),
        draw=jnp.asarray(tokens.draw, float),
        weight=jnp.asarray(tokens.weight, float),
    )


def pair_flows(messages: np.ndarray, rounds: int = 1, vectors: np.ndarray | float = 1.0) -> Flows:
    """Messages [source, destination] as one flow per destination; those to it are of `vectors` hidden vectors."""
    sizes = np.broadcast_to(vectors, len(messages))
    return Flows(jnp.asarray(messages.T, float), jnp.eye(len(messages)), jnp.asarray(sizes, float), rounds=rounds)


def congestion(topology, flows: Flows, vector_bytes, chunk_bytes) -> StageTime:
    """The congestion model's time of flows under store-and-forward."""
    return Congestion(chunk_bytes).of_flows(topology, flows, vector_bytes)


def mirrored_congestion(topology, flows: Flows, vector_bytes, chunk_bytes) -> StageTime:
    """The same for the flows sent back."""
    return Congestion(chunk_bytes).of_mirrored(topology, flows, vector_bytes)
