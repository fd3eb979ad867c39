"""Gradient descent over relaxed plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from oracles.compilations import compilations
from small_problem import EXPERTS, LAYERS, NODES, SETTINGS, TOKENS, TOP_K, small_problem

from jaxmoe.engine import Decisions, Movement
from jaxmoe.network import build_exchange
from jaxmoe.tune import PlacementProblem, descent
from jaxmoe.tune.descent import AbstractParameters, TransportPlan, random_plans

STEADY = {"temperature": (0.3, 0.3), "width": (0.3, 0.3), "max_temperature": (0.05, 0.05)}


def test_annealed_values_run_from_end_to_end_over_all_segments():
    ends = {"temperature": (1.0, 0.01), "width": (2.0, 0.5), "max_temperature": (0.1, 0.1)}
    first, last = descent.schedule(0, 50, ends), descent.schedule(25, 50, ends)
    assert first.temperature.shape == (descent.SEGMENT,)
    np.testing.assert_allclose([first.temperature[0], last.temperature[-1]], [1.0, 0.01], rtol=1e-5)
    np.testing.assert_allclose([first.width[0], last.width[-1]], [2.0, 0.5], rtol=1e-5)
    both = np.concatenate([first.temperature, last.temperature])
    np.testing.assert_allclose(both[1:] / both[:-1], 0.01 ** (1 / 49), rtol=1e-4)
    np.testing.assert_allclose(descent.schedule(75, 50, ends).temperature, 0.01, rtol=1e-5)


def under(name: str, tokens: int = TOKENS) -> PlacementProblem:
    problem = small_problem(tokens=tokens)
    return problem.under(build_exchange(name, problem.model.machine.topology))


def test_every_step_has_its_own_batches_of_the_problem():
    problem = under("random_host")
    batches = descent.segment_batches(problem, 2, seed=7)
    drawn = problem.draw(2 * descent.SEGMENT, 7)
    assert batches.experts.shape[:3] == (descent.SEGMENT, LAYERS, 2)
    for step in (0, 3):
        np.testing.assert_array_equal(batches.experts[step], drawn.experts[:, 2 * step : 2 * step + 2])
    assert not np.array_equal(batches.experts[0], batches.experts[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lowest_host", "fewest_hops", "corner_host", "corner_host_split_tree"])
def test_merged_batches_descend_alike(name):
    problem = under(name, tokens=64)
    merged = descent.segment_batches(problem, 2, seed=7)
    apart = descent._by_step(problem.draw(2 * descent.SEGMENT, 7))
    assert merged.weight.shape[:3] == (descent.SEGMENT, LAYERS, 2)
    assert merged.experts.ndim < apart.experts.ndim
    land, start = descent.landscape(problem, 0.2, 0.05), descent.start(problem, SETTINGS.restarts, seed=0)
    schedule = descent.schedule(0, 50, STEADY)
    (_, together), (_, separate) = (descent.descend(land, start, batches, schedule) for batches in (merged, apart))
    np.testing.assert_allclose(together[0], separate[0], rtol=1e-5)
    np.testing.assert_allclose(together, separate, rtol=1e-2)  # small differences grow step by step


def repeated(problem, seed=0):
    """One pair of batches for every step, so that the objective falls for no other reason than descent."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), descent.segment_batches(problem, 2, seed=seed)
    )


def test_descent_lowers_the_objective_of_every_layer_and_restart():
    problem = small_problem()
    land = descent.landscape(problem, 0.2, 0.05)
    state = descent.start(problem, SETTINGS.restarts, seed=0)
    moved, seconds = descent.descend(land, state, repeated(problem), descent.schedule(0, 50, STEADY))
    assert seconds.shape == (descent.SEGMENT, LAYERS, SETTINGS.restarts)
    assert np.isfinite(seconds).all()
    assert (seconds[-1] < 0.97 * seconds[0]).all()
    shares = np.asarray(descent.relaxed_shares(land, moved.plans, jnp.float32(0.3)))
    assert shares.shape == (LAYERS, SETTINGS.restarts, EXPERTS, NODES)
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-5)
    still, held = descent.descend(
        descent.landscape(problem, 0.2, 0.0), state, repeated(problem), descent.schedule(0, 50, STEADY)
    )
    np.testing.assert_allclose(held[-1], held[0], rtol=1e-6)
    np.testing.assert_array_equal(still.plans.logits, state.plans.logits)


class Carried(AbstractParameters):
    """A placement, and how much of every expert is sent to every node before the layer."""

    plan: TransportPlan
    copy: Float[Array, "*lead expert node"]

    def decisions(self, frequency, node_part, temperature, budget_spread):
        share = self.plan.share(frequency, node_part, temperature, budget_spread)
        return Decisions(share, movements=(Movement(jax.nn.sigmoid(self.copy)),))


def test_any_parameters_of_decisions_descend():
    problem = small_problem()
    land, plans = descent.landscape(problem, 0.2, 0.05), random_plans(0, LAYERS, 2, EXPERTS, NODES)
    state = descent.start_from(Carried(plans, jnp.zeros((LAYERS, 2, EXPERTS, NODES))))
    moved, seconds = descent.descend(land, state, repeated(problem), descent.schedule(0, 50, STEADY))
    assert (seconds[-1] < 0.97 * seconds[0]).all()
    # What is sent helps nothing here, and takes time: descent sends less of it.
    assert float(moved.plans.copy.mean()) < -0.1
    assert not np.array_equal(moved.plans.plan.logits, plans.logits)


def test_restarts_and_seeds_start_differently():
    problem = small_problem()
    one, same, other = (np.asarray(descent.start(problem, 3, seed).plans.logits) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert len(np.unique(one)) == one.size


def test_a_node_filled_beyond_its_room_costs_time():
    values = []
    for room in (np.inf, [np.inf, 0.5, np.inf, np.inf]):
        problem = small_problem(room=np.array(room))
        land = descent.landscape(problem, 0.2, 0.05)
        state = descent.start(problem, SETTINGS.restarts, seed=0)
        values.append(descent.descend(land, state, repeated(problem), descent.schedule(0, 50, STEADY))[1][0])
    shares = np.asarray(descent.relaxed_shares(land, state.plans, jnp.float32(0.3)))
    overfull = np.maximum(shares[..., 1].sum(axis=-1) / 0.5 - 1, 0)
    expected = descent.MEMORY_WEIGHT * float(land.scale) * overfull**2
    assert overfull.min() > 0
    np.testing.assert_allclose(values[1] - values[0], expected, rtol=1e-3)


def test_no_number_compiles_a_segment_anew():
    def inputs(spread=0.2, rate=0.05, ends=STEADY, steps=50, seed=0, **problem):
        problem = small_problem(**problem)
        land, schedule = descent.landscape(problem, spread, rate), descent.schedule(0, steps, ends)
        start = descent.start(problem, SETTINGS.restarts, seed)
        return land, start, descent.segment_batches(problem, 2, seed), schedule

    annealed = {"temperature": (1.0, 0.1), "width": (0.5, 0.1), "max_temperature": (0.1, 0.01)}
    first, *others = [
        inputs(),
        inputs(rate=0.1),
        inputs(spread=0.5),
        inputs(ends=annealed, steps=600),
        inputs(link_factor=3.0),
        inputs(flops_factor=2.0),
        inputs(message_factor=0.25),
        inputs(p95_weight=0.5),
        inputs(room=1.6),
        inputs(trace_seed=1),
        inputs(seed=1),
    ]
    results = [descent.descend(*first)[1]]
    with compilations() as compiled:
        results += [descent.descend(*other)[1] for other in others]
        assert compiled == []
        jax.jit(lambda x: x + 1)(1)
        assert compiled  # or nothing would be seen at all
    ends = {float(np.asarray(seconds)[-1].mean()) for seconds in results}
    assert len(ends) == len(results)  # each of the numbers was heard


@pytest.mark.parametrize("flops_factor", [1.0, 4.0])
def test_the_scale_is_the_time_of_even_work(flops_factor):
    problem = small_problem(flops_factor=flops_factor)
    land = descent.landscape(problem, 0.2, 0.05)
    flops = np.asarray(problem.model.machine.die.flops)
    assert float(land.scale) == pytest.approx(TOKENS * TOP_K * 5e6 / flops.sum(), rel=1e-5)
    np.testing.assert_allclose(land.node_part, flops / flops.sum(), rtol=1e-5)
