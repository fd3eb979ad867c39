"""The witness is independent of what it testifies about, and agrees with it."""

import ast
import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

import jaxmoe.des
from jaxmoe.des import (
    LayerDescription,
    Memory,
    fabric_of,
    layer_seconds,
    movement_seconds,
    replay_layer,
    seconds_beside_weights,
)
from jaxmoe.engine import Decisions, IdleLinks, Layer, LayerCosts, LayerTime, Movement, Pipelined
from jaxmoe.hardware import Die, Machine, Mesh, clusters, node_memory, torus, wafers
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.placement.exchange import Gather, Rings
from jaxmoe.relax import HardMax
from jaxmoe.traces import Batch

SOURCES = sorted(Path(jaxmoe.des.__file__).parent.glob("*.py"))
ALLOWED = ("des", "errors", "hardware", "placement", "registry", "threads", "traces")  # `registry` holds names alone


def imported(source: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(source.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_formula_of_the_model_is_imported(source):
    own = {name for name in imported(source) if name.split(".")[0] in ("jaxmoe", "")}
    assert all(name.split(".")[1] in ALLOWED for name in own), own


def random_layer(
    mode: str, gather: str, rings: tuple[int, ...] | None, both_ways: bool = False
) -> tuple[LayerDescription, np.ndarray, Batch, Mesh]:
    """128 tokens, each with 2 of 8 experts, on a 4x4 mesh of unequal links, in small chunks.

    The model adds the delay of the longest path to the time of the busiest link, which need not lie on it. So
    stages here carry enough for that delay, at most 0.1 us, to be a small part of them.
    """
    rng = np.random.default_rng(7)
    shape, nodes, links = (4, 4), 16, num_links((4, 4))
    share = np.zeros((8, nodes), np.float32)
    for row in share:
        row[rng.choice(nodes, 3, replace=False)] = rng.dirichlet(np.ones(3))
    mesh = Mesh(
        jnp.asarray(rng.uniform(40e9, 60e9, links), jnp.float32),
        jnp.asarray(rng.uniform(5e-9, 10e-9, links), jnp.float32),
        shape=shape,
    )
    layer = LayerDescription(
        fabric=fabric_of(mesh, chunk_bytes=256.0),
        flops=rng.uniform(1e12, 5e12, nodes).astype(np.float32),
        memory=(Memory(rng.uniform(1e11, 1e12, nodes).astype(np.float32), np.zeros(nodes), np.arange(nodes)),),
        dispatch_bytes=16384.0,
        combine_bytes=16384.0,
        expert_bytes=1e7,
        flops_per_token_expert=1e8,
        mode=mode,
        exchange=Gather(gather) if rings is None else Rings(rings, both_ways, between=False),
    )
    batch = Batch(
        experts=jnp.asarray(np.stack([rng.choice(8, 2, replace=False) for _ in range(128)]), jnp.int32),
        token_draw=jnp.asarray((rng.integers(2, size=128) + 0.5) / 2, jnp.float32),
        draw=jnp.asarray(rng.random((128, 2)), jnp.float32),
        weight=full(128, 1.0),
    )
    return layer, share, batch, mesh


def analytic_model(layer: LayerDescription, mesh: Mesh) -> Layer:
    numbers = (layer.combine_bytes, layer.dispatch_bytes, layer.expert_bytes, layer.flops_per_token_expert, 1.0, 1.0)
    return Layer(
        machine=Machine(mesh, Die(jnp.asarray(layer.flops)), node_memory(jnp.asarray(layer.memory[0].bandwidth))),
        costs=LayerCosts(*(jnp.asarray(number) for number in numbers)),
        time_model=Congestion(jnp.asarray(layer.fabric.chunk_bytes)),
        exchange=build_exchange(layer.exchange, mesh),
        mode=layer.mode,
    )


@eqx.filter_jit
def timed(model: Layer, share: jax.Array, batch: Batch) -> LayerTime:
    return model(share, batch)


@pytest.mark.parametrize(
    ("mode", "gather", "rings", "both_ways"),
    [
        ("sharded", "lowest_host", None, False),
        ("sharded", "fewest_hops", None, False),
        ("replicated", "lowest_host", None, False),
        ("replicated", "fewest_hops", None, False),
        ("sharded", "lowest_host", (1,), False),
        ("sharded", "lowest_host", (1,), True),
        ("replicated", "lowest_host", (2, 2), False),
        ("replicated", "lowest_host", (2, 2), True),
    ],
)
def test_the_analytic_model_is_borne_out(mode, gather, rings, both_ways):
    layer, share, batch, mesh = random_layer(mode, gather, rings, both_ways)
    seen = replay_layer(layer, share, batch)
    told = timed(analytic_model(layer, mesh), jnp.asarray(share), batch)
    # Loads and node times are the same sums. Stage times differ by what links wait for each other.
    np.testing.assert_allclose(told.dispatch_link_time, seen.link_busy["dispatch"], rtol=1e-5)
    np.testing.assert_allclose(told.combine_link_time, seen.link_busy["combine"], rtol=1e-5)
    np.testing.assert_allclose(told.node_time, seen.node_busy, rtol=1e-5)
    np.testing.assert_allclose(told.dispatch, seen.stages["dispatch"], rtol=0.02)
    np.testing.assert_allclose(told.combine, seen.stages["combine"], rtol=0.02)
    np.testing.assert_allclose(told.total, seen.total_s, rtol=0.02)


@pytest.mark.parametrize(
    ("exchange", "parts"),
    [(Gather("least_loaded"), 2), (Gather("token_home", "tree"), 3), (Rings((1,), both_ways=True), 3)],
)
def test_pipelines_of_micro_batches_are_borne_out(exchange, parts):
    layer, share, batch, mesh = random_layer("sharded", "lowest_host", None)
    fast = dataclasses.replace(layer.memory[0], bandwidth=30 * layer.memory[0].bandwidth)  # stages of like length
    layer = dataclasses.replace(layer, exchange=exchange, micro_batches=parts, flops=30 * layer.flops, memory=(fast,))
    seen = replay_layer(layer, share, batch)
    model = dataclasses.replace(analytic_model(layer, mesh), schedule=Pipelined(parts))
    told = timed(model, jnp.asarray(share), batch)
    np.testing.assert_allclose(told.dispatch_link_time, seen.link_busy["dispatch"], rtol=1e-5)
    np.testing.assert_allclose(told.node_time, seen.node_busy, rtol=1e-5)
    for name, seconds in told.stages.items():
        np.testing.assert_allclose(seconds, seen.stages[name], rtol=0.05)
    np.testing.assert_allclose(told.total, seen.total_s, rtol=0.03)
    # Stages of different micro-batches run at once.
    assert seen.total_s < 0.97 * sum(seen.stages.values())


def test_a_pipeline_by_hand():
    # Two nodes, one expert on node 1, four tokens on node 0, 4 B/s: a micro-batch of two tokens takes 4 s each way and
    # 6 s of compute. Network: D1 0-4, D2 4-8, C1 10-14, C2 16-20; nodes: 4-10, 10-16.
    line = Mesh(full(2, 4.0), full(2, 0.0), shape=(1, 2))
    layer = LayerDescription(
        fabric=fabric_of(line, chunk_bytes=None, cut_through=True),
        flops=np.ones(2),
        dispatch_bytes=8.0,
        combine_bytes=8.0,
        expert_bytes=1.0,
        flops_per_token_expert=3.0,
        mode="sharded",
        exchange=Gather("token_home"),
        micro_batches=2,
    )
    tokens = {"experts": jnp.zeros((4, 1), jnp.int32), "token_draw": full(4, 0.0), "draw": full((4, 1), 0.0)}
    batch = Batch(**tokens, weight=full(4, 1.0), source=jnp.zeros(4, jnp.int32))
    seen = replay_layer(layer, np.array([[0.0, 1.0]]), batch)
    assert seen.stages == {"dispatch": 8, "compute": 12, "combine": 8}
    assert seen.total_s == 20


def test_movements_are_borne_out():
    layer, share, _, mesh = random_layer("sharded", "lowest_host", None)
    rng, model = np.random.default_rng(1), analytic_model(layer, mesh)
    destination = np.zeros(share.shape, bool)
    destination[[1, 4]] = True
    destination[6] = rng.random(share.shape[1]) < 0.4
    seen = movement_seconds(layer, share.astype(float), destination)

    @jax.jit
    def told(destination):
        fine = dataclasses.replace(model, time_model=Congestion(jnp.asarray(1e4)))
        stage = Movement(destination).stage(fine, jnp.asarray(share), "movement")
        return stage.demand.usage(model.machine, HardMax()).seconds

    np.testing.assert_allclose(told(destination.astype(np.float32)), seen, rtol=0.05)
    assert movement_seconds(layer, share.astype(float), np.zeros(share.shape, bool)) == 0
    # What an expert's own host is to have is there.
    assert movement_seconds(layer, np.eye(8, 16), np.eye(8, 16, dtype=bool)) == 0


def test_a_movement_by_hand():
    # On a line of three, expert 0 lives half on node 0 and half on node 1, and goes to node 2: 0.5 B over two links and
    # 0.5 B over one. At 1 B/s and in many chunks the last link carries both, first from node 1, then from node 0.
    line = Mesh(full(4, 1.0), full(4, 0.0), shape=(1, 3))
    layer = LayerDescription(fabric_of(line, None, cut_through=False), np.ones(3), 1.0, 1.0, 1.0, 1.0, "sharded")
    assert movement_seconds(layer, np.array([[0.5, 0.5, 0.0]]), np.array([[False, False, True]])) == pytest.approx(
        1.0, rel=1e-2
    )


def test_weights_beside_a_layer_by_hand():
    # Two nodes, two tokens of node 0 whose expert is on node 1, 2 B each way at 1 B/s: dispatch 3 to 7 s after 3 s of
    # attention, compute 5 s, combine 12 to 16 s. A weight of 6 B leaves node 0 at once: 3 s until dispatch, which has
    # the link for 4 s, then 3 s more: it is there after 10 s. One of 12 B is there after 16 s, and delays nothing.
    line = Mesh(full(2, 1.0), full(2, 0.0), shape=(1, 2))
    tokens = {"experts": jnp.ones((2, 1), jnp.int32), "token_draw": full(2, 0.0), "draw": full((2, 1), 0.0)}
    batch = Batch(**tokens, weight=full(2, 1.0), source=jnp.zeros(2, jnp.int32))
    share, destination = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[False, True], [False, False]])

    def seen(expert_bytes: float) -> tuple[float, float]:
        fabric = fabric_of(line, chunk_bytes=None, cut_through=True)
        layer = LayerDescription(
            fabric, np.ones(2), 2.0, 2.0, expert_bytes, 2.5, "sharded", exchange=Gather("token_home")
        )
        return seconds_beside_weights(layer, share, batch, share, destination, before=3.0)

    assert seen(6.0) == pytest.approx((16, 10))
    assert seen(12.0) == pytest.approx((16, 16))
    assert seen(20.0) == pytest.approx((16, 24))


def test_weights_on_idle_links_are_borne_out():
    """The schedule `idle_links`, against weights that make room for every message."""
    layer, share, batch, mesh = random_layer("sharded", "lowest_host", None)
    rng = np.random.default_rng(2)
    told, seen = [], []
    for size in (1e6, 3e6, 3e7, 1e8, 3e8):
        sized = dataclasses.replace(layer, expert_bytes=size)
        model = dataclasses.replace(analytic_model(sized, mesh), schedule=IdleLinks())
        destination = np.zeros(share.shape, bool)
        destination[rng.choice(8, 2, replace=False)] = True
        decided = Decisions(jnp.asarray(share), movements=(Movement(jnp.asarray(destination, jnp.float32)),))
        told.append(float(total_of(model, decided, batch).total))
        ends = seconds_beside_weights(sized, share, batch, share.astype(float), destination)
        assert ends[0] == pytest.approx(layer_seconds(sized, share, batch), rel=1e-2)
        seen.append(max(ends))
    assert max(seen) > 2 * min(seen)
    np.testing.assert_allclose(told, seen, rtol=0.05)


@eqx.filter_jit
def total_of(model: Layer, decided: Decisions, batch: Batch) -> LayerTime:
    return model.time(decided, batch)


@pytest.mark.parametrize(
    "topology",
    [torus((4, 4), 50e9, 5e-9), clusters(4, 4, 50e9, 5e-9, 100e9, 1e-8), wafers((2, 4), (2, 1), 50e9, 5e-9, 9e9, 1e-8)],
    ids=["torus", "clusters", "wafers"],
)
@pytest.mark.parametrize("cut_through", [False, True])
def test_layers_on_other_networks_are_borne_out(topology, cut_through):
    layer, share, batch, mesh = random_layer("sharded", "lowest_host", None)
    topology = dataclasses.replace(topology, ejection_bandwidth=full(16, 60e9))
    model = analytic_model(layer, mesh)
    model = dataclasses.replace(
        model,
        machine=Machine(topology, model.machine.die),
        time_model=Congestion(model.time_model.chunk_bytes, cut_through=cut_through),
    )
    seen = replay_layer(dataclasses.replace(layer, fabric=fabric_of(topology, 256.0, cut_through)), share, batch)
    told = timed(model, jnp.asarray(share), batch)
    np.testing.assert_allclose(told.combine_link_time, seen.link_busy["combine"], rtol=1e-5)
    np.testing.assert_allclose(told.dispatch, seen.stages["dispatch"], rtol=0.03)
    np.testing.assert_allclose(told.combine, seen.stages["combine"], rtol=0.03)
