"""Rollouts: worked by hand, against a loop of steps, and under the transformations of JAX."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats, full
from small_dynamic import EXPERTS, skewed_batches

from jaxmoe.engine import (
    AbstractMethod,
    Decisions,
    IdleLinks,
    Layer,
    LayerCosts,
    LayerExchanges,
    Serial,
    evaluate,
    rollout,
)
from jaxmoe.hardware import Die, Machine, Mesh
from jaxmoe.methods import (
    FixedAllowance,
    MovingAverage,
    PerfectForecast,
    PreBroadcast,
    StaticPlan,
    WindowAllowance,
    broadcast_experts,
)
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch

LAYERS, STEPS, SHAPE = 3, 3, (2, 3)


def numbers(*values):
    return tuple(jnp.asarray(float(value)) for value in values)


def two_nodes(schedule) -> Layer:
    """Node 0 takes 1 s for a product and node 1 takes 3 s; a vector takes 1 s on a link, an expert 5 s."""
    mesh = Mesh(full(2, 1.0), full(2, 0.0), shape=(1, 2))
    machine = Machine(mesh, Die(floats([3.0, 1.0])))
    return Layer(
        machine=machine,
        costs=LayerCosts(*numbers(1, 1, 5, 3, 1, 1)),
        time_model=Congestion(jnp.asarray(0.0)),
        exchange=build_exchange("lowest_host", mesh),
        mode="sharded",
        schedule=schedule,
    )


def both_experts() -> Batch:
    """Four tokens that choose both experts and live with the first; in layer 1 two of them choose none."""
    experts = np.broadcast_to([0, 1], (LAYERS, STEPS, 4, 2)).copy()
    experts[1, :, 2:] = -1
    return Batch(
        experts=jnp.asarray(experts, jnp.int32),
        token_draw=full((LAYERS, STEPS, 4), 0.25),
        draw=full((LAYERS, STEPS, 4, 2), 0.0),
        weight=full((LAYERS, STEPS, 4), 1.0),
    )


def by_window(hidden: bool) -> PreBroadcast:
    """Expert e is on node e. Eq. 17 has 11 s for an expert."""
    share = jnp.broadcast_to(floats(np.eye(2)), (LAYERS, 2, 2))
    return PreBroadcast(share, *numbers(3), PerfectForecast(), WindowAllowance(*numbers(11, 1, 1)), 2, hidden)


# A layer of four tokens takes 12 s of compute at node 1 and 4 s each way. Where expert 1 is broadcast, tokens 2 and 3
# are served at node 0, so that both nodes compute for 6 s, and 2 s each way remain. With two tokens it is 6 + 2 + 2,
# and 3 + 1 + 1. Layer 0 sees layer 2 as its window, which never has time for 11 s itself: layer 1 takes 10 s at most.
TOTALS = np.array([[20.0, 10, 20], [10, 5, 20], [10, 10, 20]])
BROADCAST = np.array([[0, 0, 0], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("schedule", "hidden", "charge"),
    [
        pytest.param(Serial(), True, 0, marks=pytest.mark.slow),
        (Serial(), False, 5),
        pytest.param(IdleLinks(), True, 0, marks=pytest.mark.slow),
        # The link from node 1 carries 2 s of combine and 5 s of the expert: less than the 10 s of the layer. Of two
        # tokens it carries 1 s and 5 s, and the layer has 5 s.
        (IdleLinks(), False, [[0, 0, 0], [0, 1, 0], [0, 0, 0]]),
    ],
)
def test_three_steps_by_hand(schedule, hidden, charge):
    _, times, decisions = rollout(by_window(hidden), two_nodes(schedule), both_experts())
    expected = TOTALS + np.array(charge) * BROADCAST
    if schedule == Serial() and not hidden:
        # Longer layers leave longer windows: layer 1 takes 15 s or more of layer 0, which it sees.
        expected = np.array([[20.0, 10, 20], [15, 10, 20], [15, 10, 20]])
        np.testing.assert_array_equal(times.stages["movement"], [[0, 0, 0], [5, 5, 0], [5, 5, 0]])
    else:
        np.testing.assert_array_equal(times.stages["movement"], 5 * BROADCAST)
        np.testing.assert_array_equal(broadcast_experts(decisions).sum(axis=-1), BROADCAST)
    np.testing.assert_allclose(times.total, expected, rtol=1e-6)
    np.testing.assert_array_equal(decisions.served[1, 0], [[-1, 1], [-1, 1], [-1, 0], [-1, 0]])


class Recorder(AbstractMethod):
    """Remembers the times it was shown, and counts its steps."""

    share: jax.Array

    def init(self, machine):
        return full((STEPS + 1, LAYERS), 0.0), jnp.asarray(0)

    def step(self, machine, state, tokens, last):
        seen, count = state
        return (seen.at[count].set(last.total), count + 1), Decisions(self.share * (1 + count))


def random_rollout(seed: int):
    rng = np.random.default_rng(seed)
    model = cases.layer_model(cases.random_machine(rng, SHAPE))
    share = floats(np.stack([cases.random_share(rng, EXPERTS, 6) for _ in range(LAYERS)]))
    return model, share, skewed_batches(rng, LAYERS, STEPS, tokens=24)


def test_a_step_sees_the_times_of_the_step_before():
    model, share, steps = random_rollout(0)
    (seen, count), times, decisions = rollout(Recorder(share), model, steps)
    assert int(count) == STEPS
    np.testing.assert_array_equal(seen[0], np.zeros(LAYERS))
    np.testing.assert_array_equal(seen[1:STEPS], times.total[: STEPS - 1])
    assert len(np.unique(times.total)) == times.total.size
    np.testing.assert_allclose(decisions.share, share * np.arange(1, STEPS + 1).reshape(-1, 1, 1, 1), rtol=1e-6)


def adaptive(model: Layer, share, rate=0.5, experts=2) -> PreBroadcast:
    frequency = full(share.shape[:2], 1 / EXPERTS)
    forecast, allowance = MovingAverage(frequency, jnp.asarray(rate)), FixedAllowance(jnp.asarray(experts))
    return PreBroadcast(share, model.costs.flops_per_token_expert, forecast, allowance, 4)


def test_a_rollout_is_a_loop_of_steps():
    model, share, steps = random_rollout(1)
    method = adaptive(model, share)
    _, times, decisions = rollout(method, model, steps)
    decide, timed = eqx.filter_jit(method.step), eqx.filter_jit(model.time)
    state, last = method.init(model.machine), jax.tree.map(lambda leaf: np.zeros_like(leaf[0]), times)
    steps = jax.tree.map(np.asarray, steps)
    for step in range(STEPS):
        tokens = jax.tree.map(lambda leaf, at=step: leaf[:, at], steps)
        state, decided = decide(model.machine, state, tokens, last)
        decided = jax.tree.map(np.asarray, decided)
        layers = [
            timed(*(jax.tree.map(lambda leaf, at=row: leaf[at], both) for both in (decided, tokens)))
            for row in range(LAYERS)
        ]
        last = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
        np.testing.assert_array_equal(decisions.served[step], decided.served)
        jax.tree.map(
            lambda one, other, at=step: np.testing.assert_allclose(one, other[at], rtol=1e-5, atol=1e-12), last, times
        )


def test_a_static_plan_is_what_evaluation_has():
    model, share, steps = random_rollout(2)
    _, times, decisions = rollout(StaticPlan(share), model, steps)
    expected = evaluate(model, share, steps)
    assert decisions.served is None
    assert "movement" not in times.stages
    np.testing.assert_allclose(times.total.T, expected.total, rtol=1e-6)
    np.testing.assert_allclose(times.combine_link_time.mean(axis=0), expected.combine_link_time, rtol=1e-5)


@pytest.mark.slow
def test_every_layer_has_its_exchange():
    model, share, steps = random_rollout(3)
    share = share.at[1].set(1 / 6)
    names = ["fewest_hops", "ring", "fewest_hops"]
    exchanges = LayerExchanges.from_names(names, lambda name: build_exchange(name, model.machine.topology))
    assert exchanges.rows == ((0, 2), (1,))
    _, times, _ = rollout(StaticPlan(share), model, steps, exchanges)
    for row, name in enumerate(names):
        one = jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], steps)
        alone = evaluate(model, share[row : row + 1], one, build_exchange(name, model.machine.topology))
        np.testing.assert_allclose(times.total[:, row], alone.total[0], rtol=1e-6)


def test_layers_one_after_the_other_take_the_same_time(monkeypatch):
    model, share, batches = random_rollout(2)
    side_by_side = rollout(StaticPlan(share), model, batches).time
    assert not model.in_turn(batches)
    monkeypatch.setattr("jaxmoe.engine.layer.MOST_VISITS", 1)
    assert model.in_turn(batches)
    in_turn = rollout(StaticPlan(share), model, batches, keep=lambda _, time: (time, ()))  # traced anew
    for one, other in zip(jax.tree.leaves(in_turn.time), jax.tree.leaves(side_by_side), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_is_kept_is_for_the_caller_to_say():
    model, share, steps = random_rollout(3)
    kept = rollout(StaticPlan(share), model, steps, keep=lambda decisions, time: (time, 2 * decisions.share)).kept
    np.testing.assert_array_equal(kept, np.broadcast_to(2 * np.asarray(share), (STEPS, *share.shape)))


def test_vmap_over_machines_equals_one_by_one():
    models = [random_rollout(seed)[0] for seed in (4, 5, 6)]
    _, share, steps = random_rollout(4)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)

    def totals(model):
        return rollout(adaptive(model, share), model, steps)[1].total

    together = eqx.filter_jit(eqx.filter_vmap(totals))(stacked)
    assert together.shape == (3, STEPS, LAYERS)
    for row, model in enumerate(models):
        np.testing.assert_allclose(together[row], totals(model), rtol=1e-6)


def test_a_rollout_may_be_part_of_another_function():
    model, share, steps = random_rollout(8)

    class Memoryless(StaticPlan):
        memoryless = True

        def step(self, machine, state, tokens, last):
            return state, Decisions(self.share)

    for kind in (StaticPlan, Memoryless):

        def mean(share, kind=kind):
            return rollout(kind(share), model, steps).time.total.mean()

        alone = pytest.approx(float(mean(share)), rel=1e-6)
        value, slope = jax.value_and_grad(mean)(share)
        assert value == alone
        assert np.isfinite(np.asarray(slope)).all()
        assert jax.jit(mean)(share) == alone
        assert jax.jit(lambda one, mean=mean: one * mean(share))(1.0) == alone  # of constants alone


def test_other_numbers_do_not_compile_anew():
    compiled = []

    class Counted(PreBroadcast):
        def init(self, machine):
            compiled.append(None)
            return super().init(machine)

    for seed, experts in enumerate((1, 3, 4)):
        model, share, steps = random_rollout(seed)
        made = adaptive(model, share, rate=0.1 * experts, experts=experts)
        same = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        rollout(Counted(**same), model, steps)
    assert len(compiled) == 1


def test_gradients_of_a_soft_rollout_agree_with_differences():
    model, share, steps = random_rollout(7)
    logits = np.log(np.asarray(share) + np.float32(0.02))

    @jax.jit
    @jax.value_and_grad
    def mean(logits):
        soft = {"reduction": SmoothMax(jnp.asarray(0.05)), "support": SoftSupport(jnp.asarray(0.1))}
        return rollout(StaticPlan(jax.nn.softmax(logits)), model, steps, **soft)[1].total.mean() * 1e6

    gradient = np.asarray(mean(logits)[1])
    assert np.isfinite(gradient).all()
    direction = np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
    ahead, behind = (float(mean(logits + step * direction)[0]) for step in np.float32([0.02, -0.02]))
    slope = (ahead - behind) / 0.04
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=0.03)
