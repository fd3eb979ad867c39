"""Rules that have to know the batch in the event simulator: by hand, and as the model charges them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.topologies import both_ways, mesh

from jaxmoe.des import LayerReplay, fabric_of, record_layer, replay_layer, replay_plan, timeline_events
from jaxmoe.engine import Deciding, Layer, evaluate, schedule_of, serving_of
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.hardware import AbstractTopology, Die, Machine, build_graph, clusters
from jaxmoe.placement.copies import Copies, LeastWork
from jaxmoe.placement.regions import region_copies, regions_named
from jaxmoe.traces import Batch

CHOICE, TOLD = 2.0**-24, 100.0  # s, of which float32 has all digits, and B
ENDS = both_ways((0, 1), (1, 2))
LINE = build_graph(3, ENDS, np.full(4, 1e9), np.full(4, 10e-9), np.zeros((3, 2)))
TOKENS = Batch(
    experts=jnp.asarray([[0, 1], [1, 2], [0, 2], [1, 2]], jnp.int32),
    token_draw=jnp.full(4, 0.1),
    draw=jnp.full((4, 2), 0.1),
    weight=jnp.ones(4),
    source=jnp.asarray([0, 0, 1, 2], jnp.int32),
)


def charged(model: Layer) -> Layer:
    return replace(model, costs=replace(model.costs, deciding=Deciding(jnp.asarray(CHOICE), jnp.asarray(TOLD))))


def replayed(model: Layer, exchange: str) -> LayerReplay:
    """The four tokens, experts on a node each, whole messages."""
    layer = describe_model(model, fabric_of(LINE, None), "sharded", exchange)
    return replay_layer(layer, np.eye(3, dtype=np.float32), TOKENS)


@pytest.mark.parametrize(("exchange", "choices"), [("least_loaded", 4), ("least_congested_by_3", 2), ("token_home", 0)])
def test_a_layer_by_hand(exchange, choices):
    """Node 1 tells node 2 of its own token in 100 ns, and then of both from node 0, which came at 110 and 210 ns: the
    last of them is there at 320 ns."""
    model = cases.model_on(Machine(LINE, Die(floats(np.full(3, 1e12)))), rule=exchange)
    free, paid = replayed(model, exchange), replayed(charged(model), exchange)
    seconds = choices and 320e-9 + choices * CHOICE
    assert paid.stages["dispatch"] - free.stages["dispatch"] == pytest.approx(seconds, abs=1e-15)
    assert paid.total_s - free.total_s == pytest.approx(seconds, abs=1e-15)
    assert paid.free_running_s - free.free_running_s == pytest.approx(seconds, abs=1e-15)
    assert (paid.link_bytes - free.link_bytes).sum() == pytest.approx(8 * TOLD if choices else 0)
    np.testing.assert_array_equal(paid.node_busy, free.node_busy)


EXPERTS, RATE, LATENCY = 8, 4e9, 1e-9
NETWORKS = {"mesh": mesh((2, 4), RATE, LATENCY), "clusters": clusters(2, 4, RATE, LATENCY, RATE, LATENCY)}


def drawn_batches(rng: np.random.Generator) -> Batch:
    drawn = [replace(cases.random_tokens(rng, 63, EXPERTS, 2), weight=np.ones(63)) for _ in range(2)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *map(cases.batch, drawn))


def by_least_work(topology: AbstractTopology) -> Copies:
    copies = region_copies(regions_named("regions_2_ep"), np.ones((1, EXPERTS)), topology)
    return replace(copies, serving=LeastWork(np.array([1.0]), np.array([0.1])))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("schedule", ["serial", "pipelined(2)"])
@pytest.mark.parametrize(
    ("exchange", "copied"),
    [
        ("least_congested", False),
        ("least_congested_by_8", False),
        ("least_loaded", False),
        ("fewest_hops_tree", True),
        ("least_congested", True),
    ],
)
def test_the_model_agrees_with_the_simulator(network, schedule, exchange, copied):
    rng, topology = np.random.default_rng(0), NETWORKS[network]
    machine = Machine(topology, Die(floats(np.full(8, 1e12))))
    free = cases.model_on(machine, rule=exchange, schedule=schedule_of(schedule))
    copies = by_least_work(topology) if copied else None
    share = cases.random_share(rng, EXPERTS, 8)[None].astype(np.float32) if copies is None else copies.share
    batches, serving = drawn_batches(rng), None if copies is None else serving_of(copies)
    fabric, dispatches = fabric_of(topology, cases.COSTS.chunk_bytes), []
    for model in (free, charged(free)):
        time = evaluate(model, jnp.asarray(share), batches, serving=serving)
        (seen,) = replay_plan(describe_model(model, fabric, "sharded", exchange), share, batches, copies=copies)
        np.testing.assert_allclose(time.total[0], [each.total_s for each in seen], rtol=0.02)
        links = np.mean([each.link_busy["dispatch"] for each in seen], axis=0)
        np.testing.assert_allclose(time.busy["dispatch"]["link"][0], links, rtol=1e-5, atol=1e-12)
        dispatches.append((time.dispatch[0], np.array([each.stages["dispatch"] for each in seen])))
    (told_free, seen_free), (told, seen) = dispatches
    # The longest path does not always come on top of the busiest link, which is much of what little is told.
    np.testing.assert_allclose(told - told_free, seen - seen_free, rtol=0.1)


def test_a_timeline_shows_a_pause_as_nothing_at_work():
    model = charged(cases.model_on(Machine(LINE, Die(floats(np.full(3, 1e12)))), rule="least_loaded"))
    fabric = fabric_of(LINE, None)
    recorded = record_layer(
        describe_model(model, fabric, "sharded", "least_loaded"), np.eye(3, dtype=np.float32), TOKENS
    )
    events = timeline_events(recorded.run, fabric, np.asarray(LINE.link_ends), recorded.stage)
    spans = [(each["ts"], each["ts"] + each["dur"]) for each in events if each["ph"] == "X"]
    assert not any(begin < 0.5 and end > 0.33 for begin, end in spans)  # µs: told at 0.32, decided at 0.52
    assert max(end for _, end in spans) == pytest.approx(recorded.run.makespan * 1e6)
