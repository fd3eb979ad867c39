"""Copies in the event simulator: who serves as in the model, and times as the model's on networks of every kind."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.topologies import both_ways, mesh

from jaxmoe.des import fabric_of, replay_plan, served_batch
from jaxmoe.engine import evaluate, schedule_of, serving_of
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import AbstractTopology, Die, Machine, build_graph, clusters, torus
from jaxmoe.network import build_exchange
from jaxmoe.placement.copies import ByDraw, Copies, LeastWork
from jaxmoe.placement.regions import region_copies, regions_named
from jaxmoe.traces import Batch

EXPERTS, TOKENS, TOP_K, BATCHES = 8, 64, 2, 2
RATE, LATENCY = 4e9, 1e-9
RULES = ("by_home", "by_draw", "least_work", "least_work_together")
EXCHANGES = ("fewest_hops_tree", "token_home", "random_host_tree", "reduce_scatter", "least_congested")


def graph() -> AbstractTopology:
    """Eight nodes on a ring with two chords."""
    ends = both_ways(*((node, (node + 1) % 8) for node in range(8)), (0, 4), (2, 6))
    places = np.stack([np.cos(np.arange(8)), np.sin(np.arange(8))], axis=1)
    return build_graph(8, ends, np.full(len(ends), RATE), np.full(len(ends), LATENCY), places)


NETWORKS = {
    "mesh": mesh((2, 4), RATE, LATENCY),
    "torus": torus((2, 4), RATE, LATENCY),
    "clusters": clusters(2, 4, RATE, LATENCY, RATE, LATENCY),
    "graph": graph(),
}


def with_rule(copies: Copies, rule: str, rng: np.random.Generator) -> Copies:
    """Copies by another rule than by home."""
    if rule == "by_home":
        return copies
    if rule.startswith("least_work"):
        return replace(copies, serving=LeastWork(np.array([1.0]), np.array([0.1]), together=rule != "least_work"))
    parts = rng.uniform(0.5, 1.5, copies.copy_of.shape)
    return replace(copies, serving=ByDraw(parts / np.bincount(copies.copy_of[0], parts[0])[copies.copy_of]))


def some_batches(rng: np.random.Generator) -> Batch:
    drawn = [cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K) for _ in range(BATCHES)]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *map(cases.batch, drawn))
    return replace(batches, weight=jnp.ones_like(batches.weight))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("regions", [1, 2, 4])
def test_the_model_agrees_with_the_simulator(network, regions):
    rng, topology = np.random.default_rng(regions), NETWORKS[network]
    model = cases.model_on(Machine(topology, Die(floats(np.full(8, 1e12)))))
    fabric, batches = fabric_of(topology, cases.COSTS.chunk_bytes), some_batches(rng)
    modelled, simulated, on_links = [], [], []
    for turn, inside in enumerate(("tp", "ep", "hybrid_2")[: 3 if regions < 4 else 2]):
        home = region_copies(regions_named(f"regions_{regions}_{inside}"), rng.uniform(1, 2, (1, EXPERTS)), topology)
        for at, rule in enumerate(RULES):
            copies, exchange = with_rule(home, rule, rng), EXCHANGES[(turn + at) % len(EXCHANGES)]
            under = build_exchange(exchange, topology)
            time = evaluate(model, jnp.asarray(copies.share), batches, under, serving=serving_of(copies))
            (seen,) = replay_plan(
                describe_model(model, fabric, "sharded", exchange), copies.share, batches, copies=copies
            )
            modelled.append(np.asarray(time.total[0]))
            simulated.append([each.total_s for each in seen])
            links = np.mean([each.link_busy["combine"] for each in seen], axis=0)
            on_links.append((np.asarray(time.busy["combine"]["link"][0]), links))
            nodes = np.mean([each.node_busy for each in seen], axis=0)
            np.testing.assert_allclose(time.busy["compute"]["node"][0], nodes, rtol=1e-5)
    assert agreement(np.array(modelled), np.array(simulated))["mean_abs_error_percent"] < 2
    assert agreement(*(np.array(side) for side in zip(*on_links, strict=True)))["r2"] > 0.999


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("visits", [0.0, 0.05, 1.0])
def test_model_and_simulator_choose_alike_at_run_time(seed, visits):
    rng = np.random.default_rng(seed)
    copies = region_copies(regions_named("regions_2_ep"), rng.uniform(1, 2, (1, EXPERTS)), NETWORKS["graph"])
    copies = replace(copies, serving=LeastWork(np.array([1.0]), np.array([visits])))
    tokens = cases.random_tokens(rng, 200, EXPERTS, 4, missing=True)
    batch = cases.batch(replace(tokens, weight=np.ones(200)))
    rule = jax.tree.map(lambda leaf: leaf[0], serving_of(copies))
    chosen = eqx.filter_jit(rule)(jnp.asarray(copies.share[0]), batch).experts
    np.testing.assert_array_equal(chosen, served_batch(copies, 0, batch).experts)


@pytest.mark.parametrize("rule", RULES)
def test_copies_are_chosen_for_whole_batches_that_are_then_cut(rule):
    rng, topology = np.random.default_rng(3), NETWORKS["mesh"]
    machine = Machine(topology, Die(floats(np.full(8, 1e12))))
    model = cases.model_on(machine, rule="token_home", schedule=schedule_of("pipelined(2)"))
    copies = with_rule(region_copies(regions_named("regions_1x2_ep"), np.ones((1, EXPERTS)), topology), rule, rng)
    batches = some_batches(rng)
    time = evaluate(model, jnp.asarray(copies.share), batches, serving=serving_of(copies))
    layer = describe_model(model, fabric_of(topology, cases.COSTS.chunk_bytes), "sharded", "token_home")
    (seen,) = replay_plan(layer, copies.share, batches, copies=copies)
    np.testing.assert_allclose(time.total[0], [each.total_s for each in seen], rtol=0.02)
