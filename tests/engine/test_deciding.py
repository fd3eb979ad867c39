"""What rules that have to know the batch are charged for: layers worked by hand, nothing where nothing is known."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.topologies import both_ways

from jaxmoe.engine import Deciding, Decisions, Layer, LayerTime, schedule_of, serving_of
from jaxmoe.hardware import Die, Machine, build_graph
from jaxmoe.network import build_exchange
from jaxmoe.placement.copies import ByDraw, Copies, LeastWork
from jaxmoe.traces import Batch

CHOICE, TOLD = 50e-9, 100.0  # s and B
ENDS = both_ways((0, 1), (1, 2))
LINE = build_graph(3, ENDS, np.full(4, 1e9), np.full(4, 10e-9), np.zeros((3, 2)))
SHARE = jnp.eye(3)
BATCH = Batch(
    experts=jnp.asarray([[0, 1], [1, 2], [0, 2], [1, 2]], jnp.int32),
    token_draw=jnp.full(4, 0.1),
    draw=jnp.full((4, 2), 0.1),
    weight=jnp.ones(4),
    source=jnp.asarray([0, 0, 1, 2], jnp.int32),
)
# Every token tells the two other nodes, and nodes 0, 1, 2 have two, one and one of them. The link from node 1 to node 2
# carries what tokens of nodes 0 and 1 have to tell, 300 B: 300 ns. The longest way has two hops of 10 ns, and on the
# first of them 100 B that have to be there whole: 120 ns.
TELLING = 420e-9


def layer(exchange: str, schedule: str = "serial") -> Layer:
    machine = Machine(LINE, Die(jnp.full(3, 1e12)))
    costs = replace(cases.COSTS, chunk_bytes=0.0)  # whole messages
    return cases.model_on(machine, rule=exchange, costs=costs, schedule=schedule_of(schedule))


def charged(model: Layer, seconds: float | jax.Array = CHOICE, told: float | jax.Array = TOLD) -> Layer:
    return replace(model, costs=replace(model.costs, deciding=Deciding(jnp.asarray(seconds), jnp.asarray(told))))


@eqx.filter_jit
def timed(model: Layer, decisions: Decisions, batch: Batch = BATCH) -> LayerTime:
    return model.time(decisions, batch)


def added(exchange: str, decisions: Decisions | None = None, batch: Batch = BATCH, schedule: str = "serial"):
    """Seconds that deciding adds to dispatch, which are all that it changes."""
    model, decided = layer(exchange, schedule), Decisions(SHARE) if decisions is None else decisions
    free, paid = timed(model, decided, batch), timed(charged(model), decided, batch)
    assert float(paid.combine) == float(free.combine)
    assert float(paid.compute) == float(free.compute)
    if schedule == "serial":
        assert float(paid.total - free.total) == pytest.approx(float(paid.dispatch - free.dispatch), rel=1e-3)
    return float(paid.dispatch - free.dispatch)


@pytest.mark.parametrize(
    ("exchange", "choices"),
    [("least_loaded", 4), ("least_loaded_tree", 4), ("least_congested", 4), ("least_congested_token_home_by_3", 2)],
)
def test_a_layer_by_hand(exchange, choices):
    assert added(exchange) == pytest.approx(TELLING + choices * CHOICE, rel=1e-4)


@pytest.mark.parametrize("exchange", ["lowest_host", "token_home_tree", "corner_host", "reduce_scatter", "ring"])
def test_what_knows_nothing_of_the_batch_pays_nothing(exchange):
    assert added(exchange) == 0


def copies_by(rule) -> Copies:
    """Two whole copies of each of three experts."""
    share = np.eye(3, dtype=np.float32)[[0, 1, 2, 1, 2, 0]][None]
    return Copies(np.array([[0, 1, 2, 0, 1, 2]]), share, rule)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("exchange", "choices"), [("token_home", 4), ("least_loaded", 8)])
def test_copies_that_serve_by_work_take_choices_of_their_own(exchange, choices, together):
    copies = copies_by(LeastWork(np.array([1.0]), np.array([0.1]), together))
    serving = jax.tree.map(lambda leaf: leaf[0], serving_of(copies))
    decided = Decisions(jnp.asarray(copies.share[0]), serving=serving)
    # Nodes tell each other once for both rules.
    assert added(exchange, decided) == pytest.approx(TELLING + choices * CHOICE, rel=1e-4)


def test_copies_that_serve_by_draw_pay_nothing():
    copies = copies_by(ByDraw(np.full((1, 6), 0.5)))
    serving = jax.tree.map(lambda leaf: leaf[0], serving_of(copies))
    assert added("token_home", Decisions(jnp.asarray(copies.share[0]), serving=serving)) == 0


def test_every_micro_batch_decides_for_itself():
    """Of three tokens two are of the first part, both of node 0: 200 ns and 120. The third, of node 1, has one hop."""
    batch = jax.tree.map(lambda leaf: leaf[:3], BATCH)
    expected = (200 + 120 + 100 + 10) * 1e-9 + 3 * CHOICE
    assert added("least_congested", batch=batch, schedule="pipelined(2)") == pytest.approx(expected, rel=1e-3)


def test_links_wait_for_decisions_and_nodes_do_not():
    """Under a pipeline the charge may be hidden behind compute; an overlap of both has it on the side of the links."""
    slow = replace(layer("least_congested"), machine=Machine(LINE, Die(jnp.full(3, 1e9))))
    for schedule in ("pipelined(2)", "overlap"):
        model = replace(slow, schedule=schedule_of(schedule))
        free, paid = timed(model, Decisions(SHARE)), timed(charged(model), Decisions(SHARE))
        assert float(paid.total - free.total) < 0.7 * float(paid.dispatch - free.dispatch)


@pytest.mark.parametrize("schedule", ["serial", "pipelined(2)"])
def test_a_charge_of_zero_is_none(schedule):
    model = layer("least_congested", schedule)
    free, paid = timed(model, Decisions(SHARE)), timed(charged(model, 0.0, 0.0), Decisions(SHARE))
    jax.tree.map(np.testing.assert_array_equal, free, paid)


@pytest.mark.parametrize("schedule", ["serial", "pipelined(2)"])
def test_gradients_reach_both_numbers_and_equal_differences(schedule):
    model = layer("least_congested", schedule)

    def total(numbers: jax.Array) -> jax.Array:
        return 1e6 * charged(model, numbers[0] * CHOICE, numbers[1] * TOLD)(SHARE, BATCH).total

    at, steps = jnp.asarray([1.0, 1.0]), 0.1 * jnp.eye(2)
    slope = jax.jit(jax.grad(total))(at)
    differences = [(total(at + step) - total(at - step)) / 0.2 for step in steps]
    assert (np.asarray(slope) > 0).all()
    np.testing.assert_allclose(slope, differences, rtol=1e-3)


def test_other_numbers_compile_nothing():
    traces = []

    @eqx.filter_jit
    def total(model: Layer) -> jax.Array:
        traces.append(None)
        return model(SHARE, BATCH).total

    times = [float(total(charged(layer("least_loaded"), CHOICE * k, TOLD * k))) for k in (0.0, 1.0, 2.0)]
    assert len(traces) == 1
    assert times == sorted(times)


def test_choices_are_counted_by_the_description():
    counts = {name: build_exchange(name, LINE).choices_in_turn(64) for name in ("least_congested_by_8", "fewest_hops")}
    assert counts == {"least_congested_by_8": 8, "fewest_hops": 0}
    assert build_exchange("least_congested_by_10", LINE).choices_in_turn(64) == 7
