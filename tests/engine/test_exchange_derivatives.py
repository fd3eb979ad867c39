"""Derivatives of the layer time under every kind of exchange, and its limit as the relaxation is taken back.

In double precision.
"""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.derivatives import check_slopes

from jaxmoe.engine import Layer
from jaxmoe.hardware import MemoryLevel
from jaxmoe.hardware.kernels import TiledGemm
from jaxmoe.relax import HardMax, SmoothMax, SoftSupport

SHAPE, NODES, EXPERTS, TOKENS, TOP_K = (2, 2), 4, 3, 5, 2

KINDS = (
    "least_loaded_tree",
    "rings_1x2",
    "lowest_host",
    "random_host",
    "token_home_split_tree",
    "fewest_hops_cross_tree",
    "reduce_scatter",
    "ring_both_ways",
    "two_level_2",
)
both_modes = pytest.mark.parametrize("mode", ["sharded", "replicated"])
# Everyday a gather in one mode, and each mode under one exchange. Rings take longest to compile.
EVERYDAY = {("least_loaded_tree", "sharded"), ("reduce_scatter", "replicated")}
kinds_and_modes = pytest.mark.parametrize(
    ("exchange", "mode"),
    [
        pair if pair in EVERYDAY else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(KINDS, ("sharded", "replicated"))
    ],
)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def random_model(rng: np.random.Generator, mode: str, exchange: str) -> Layer:
    """A machine that computes about as long as it communicates."""
    machine = cases.random_machine(rng, SHAPE, ports=True, memory=True)
    # Node 0 waits for its FLOPs, node 1 for its memory, nodes 2 and 3 for the memory that they share.
    machine.flops, machine.memory_bandwidth = np.array([5e11, 3e12, 3e12, 3e12]), np.array([3e12, 1.5e11, 3e12, 3e12])
    return cases.layer_model(machine, mode, exchange)


def with_shared_memory(model: Layer) -> Layer:
    """A second level, whose two channels two nodes share each."""
    numbers = (jnp.asarray(pair) for pair in ([3e12, 3e11], [2e-7, 1e-7], [np.inf, np.inf]))
    level = MemoryLevel(*numbers, channel=jnp.asarray([0, 0, 1, 1], jnp.int32))
    return eqx.tree_at(lambda m: m.machine.memory, model, (*model.machine.memory, level))


WHERE = {
    "link_bandwidth": lambda m: m.machine.topology.link_bandwidth,
    "link_latency": lambda m: m.machine.topology.link_latency,
    "flops": lambda m: m.machine.die.flops,
    "memory": lambda m: m.machine.memory[0].bandwidth,
    "shared_memory": lambda m: m.machine.memory[1].bandwidth,
    "combine_bytes": lambda m: m.costs.combine_bytes,
}


def changed(model: Layer, numbers: dict[str, jax.Array]) -> Layer:
    names = [name for name in numbers if name in WHERE]
    return eqx.tree_at(lambda m: [WHERE[name](m) for name in names], model, [numbers[name] for name in names])


@kinds_and_modes
def test_gradients_agree_with_central_differences(exchange, mode):
    rng = np.random.default_rng(len(exchange))
    model = with_shared_memory(random_model(rng, mode, exchange))
    batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
    numbers = {name: where(model) for name, where in WHERE.items()}
    numbers["share"] = jnp.asarray(rng.dirichlet(np.full(NODES, 2.0), EXPERTS))

    def times(values):
        layer = changed(model, values)(values["share"], batch, None, SmoothMax(0.1), SoftSupport(0.1))
        return jnp.stack([layer.communication, layer.compute])

    communication, compute = check_slopes(times, numbers)
    assert communication == {"link_bandwidth", "link_latency", "combine_bytes", "share"}
    assert compute == {"flops", "memory", "shared_memory", "combine_bytes", "share"}


@both_modes
def test_gradients_of_start_ups_agree_with_central_differences(mode):
    rng = np.random.default_rng(7)
    model = random_model(rng, mode, "lowest_host")
    share = jnp.asarray(rng.dirichlet(np.full(NODES, 2.0), EXPERTS))
    batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
    numbers = {"startup": jnp.asarray(3e-6), "flops": model.machine.die.flops, "gemms": jnp.asarray(3.0)}

    def times(values):
        gemm = TiledGemm(jnp.asarray(4.0), jnp.asarray(8.0), values["startup"])
        die = dataclasses.replace(model.machine.die, flops=values["flops"], gemm=gemm)
        tiled = eqx.tree_at(lambda m: (m.machine.die, m.costs.gemms), model, (die, values["gemms"]))
        return jnp.stack([tiled(share, batch, None, reduction, SoftSupport(0.1)).total for reduction in REDUCTIONS])

    assert check_slopes(times, numbers) == [set(numbers)] * 2


REDUCTIONS = (HardMax(), SmoothMax(0.1))


@kinds_and_modes
def test_relaxed_time_tends_to_the_exact_one(exchange, mode):
    rng = np.random.default_rng(20 + len(exchange))
    model = random_model(rng, mode, exchange)
    share = jnp.asarray(cases.random_share(rng, EXPERTS, NODES, hosts=2))
    batch = cases.batch(cases.random_tokens(rng, 12, EXPERTS, TOP_K, missing=True))
    exact = eqx.filter_jit(lambda model: model(share, batch).total)(model)

    @jax.jit
    def relaxed(sharpness):
        return jax.vmap(lambda s: model(share, batch, None, SmoothMax(s), SoftSupport(s)).total)(sharpness)

    gaps = np.abs(np.asarray(relaxed(floats([0.1, 0.01, 1e-3, 1e-4, 1e-5]))) / float(exact) - 1)
    assert gaps[-1] < 1e-5 < 1e-4 < gaps[0]
