"""Machines by gradient descent: against optima worked out by hand, finite differences and the sweep's own metric."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.codesign.search import tune_hardware
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.relax import SmoothMax
from jaxmoe.tune.machine.augmented_lagrangian import feasible_starts
from jaxmoe.tune.machine.problem import MachineSearchError
from jaxmoe.tune.machine.trust_region import Cut, ExactObjective, local_optima, shadow_prices, stationarity

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
BOUNDS = {DIE: {"from": 0.01, "to": 10, "scale": "log"}, LINK: {"from": 0.1, "to": 100, "scale": "log"}}
PRICE = f"3 * {DIE} + 0.2 * {LINK}"
QUICK = {"placement": ["ep_balanced"], "starts": 4, "steps": 50}


def quiet(stage, done, total):
    pass


def tuned(problem):
    with StageTimer() as clock:
        return tune_hardware(problem, quiet, clock)


def parts(problem):
    """Seconds of compute and of traffic at 1 TFLOP/s and 1 GB/s: without latency both go as one over the rate."""
    scenario = problem.scenario_at({DIE: 1.0, LINK: 1.0})
    inputs = inputs_of(scenario, layers="3")
    times = score(inputs, problem.strategies[0], inputs.evaluation_batches)
    return float(times.compute.mean()), float(times.communication.mean())


def test_the_optimum_and_what_the_limit_is_worth_are_those_worked_out_by_hand(problem):
    limit = 1.5
    made = problem(variables=BOUNDS, constraints=[f"{PRICE} <= {limit}"], **QUICK)
    result = tuned(made)
    # Least a/x + b/y with 3 x + 0.2 y = C: by Lagrange x = C sqrt(a/3) / s and y = C sqrt(b/0.2) / s, where
    # s = sqrt(3 a) + sqrt(0.2 b); the time is s^2 / C, and its derivative by C is -s^2 / C^2.
    a, b = parts(made)
    s = np.sqrt(3 * a) + np.sqrt(0.2 * b)
    assert result.best.metric == pytest.approx(s**2 / limit, rel=1e-4)
    assert result.best.numbers[DIE] == pytest.approx(limit * np.sqrt(a / 3) / s, rel=0.01)
    assert result.best.numbers[LINK] == pytest.approx(limit * np.sqrt(b / 0.2) / s, rel=0.01)
    (met,) = result.best.constraints
    assert met.shadow_price == pytest.approx(-(s**2) / limit**2, rel=0.01)
    assert met.elasticity == pytest.approx(-1, abs=0.01)
    assert met.left == pytest.approx(limit, rel=1e-4)
    assert result.best.residual < 5e-3
    # No worse than any start, descent alone ends near it, and counted honestly.
    assert result.best.metric <= result.starts.min() * (1 + 1e-6)
    assert result.best.metric <= result.ended.min() * (1 + 1e-6)
    assert np.median(result.ended) <= 1.01 * result.best.metric < 0.9 * np.median(result.starts)
    assert result.evaluations["descend"] == 2 * 4 * 50


def test_an_equality_and_a_floor_have_the_multipliers_worked_out_by_hand(problem):
    made = problem(variables=BOUNDS, constraints=[f"{LINK} >= 5", f"2 == {PRICE}"], **QUICK)
    (found,) = local_optima(ExactObjective(made, made.groups), np.array([[0.5, 0.7]]), quiet)
    metric = made.metric(found.value)
    # All that the link leaves goes to the dies, x = (C - 0.2 y) / 3: the time a/x + b/y changes with the floor y by
    # 0.2/3 a/x^2 - b/y^2, which is above 0 here, and with the money C by -a/x^2 / 3.
    a, b = parts(made)
    x, y = (2 - 0.2 * 5) / 3, 5
    floor, money = shadow_prices(made, made.numbers(found.position.tolist()), found, metric)
    assert metric == pytest.approx(a / x + b / y, rel=1e-4)
    assert floor.shadow_price == pytest.approx(0.2 / 3 * a / x**2 - b / y**2, rel=0.02)
    assert money.shadow_price == pytest.approx(-a / x**2 / 3, rel=0.02)
    assert floor.shadow_price > 0 > money.shadow_price


def test_without_constraints_the_bounds_are_the_optimum(problem):
    made = problem(variables=BOUNDS, placement=["ep_balanced"])
    (best,) = local_optima(ExactObjective(made, made.groups), np.array([[0.6, 0.7]]), quiet)
    np.testing.assert_allclose(best.position, 1)
    assert best.stationarity.residual < 2e-3


def test_slopes_are_finite_differences_through_the_keys(problem):
    made = problem(
        variables={"half": {"from": 1, "to": 50}, DIE: BOUNDS[DIE]}, derived={LINK: "half * 2"}, placement=["tp"]
    )
    (group,) = made.groups
    one = tuple(tuple(each._replace(share=each.share[0]) for each in parts) for parts in group.arguments)

    @jax.jit
    @partial(jax.jacfwd, has_aux=True)
    def both(at):
        """Exact and relaxed, slopes and values."""
        reductions = (None, SmoothMax(jnp.asarray(0.05)))
        values = jnp.stack([made.objective(group.static, one, at, each) for each in reductions])
        return values, values

    at, step = np.array([0.3, 0.6], np.float32), 0.01
    slopes, _ = map(np.asarray, both(at))
    for index, way in enumerate(step * np.eye(2, dtype=np.float32)):
        ahead, behind = (np.asarray(both(at + sign * way)[1]) for sign in (1, -1))
        np.testing.assert_allclose(slopes[:, index], (ahead - behind) / (2 * step), rtol=0.01, atol=1e-4)


def test_groups_that_are_alike_are_compiled_once_and_each_has_its_own_time(problem):
    made = problem(variables=BOUNDS, placement=["tp", "tp_both_ways"])
    exact, at = ExactObjective(made, made.groups), np.array([0.5, 0.4])
    values, _ = exact(np.stack([at, at]))
    assert len(made.groups) == 2
    assert exact._timed._cache_size() == 1
    np.testing.assert_array_equal(exact.of(made.groups[1:])(at[None])[0], values[1:])
    assert exact._timed._cache_size() == 1
    numbers = made.numbers([float(part) for part in at])
    inputs = inputs_of(made.scenario_at({key: float(numbers[key]) for key in BOUNDS}), layers="3")
    times = [float(score(inputs, each, inputs.evaluation_batches).total.mean()) for each in made.strategies]
    assert times[0] > 1.1 * times[1]
    np.testing.assert_allclose(np.exp(values), times, rtol=1e-5)


@pytest.mark.slow
def test_the_objective_of_several_sizes_is_their_geometric_mean(problem):
    made = problem(variables={DIE: BOUNDS[DIE]}, batch_tokens=[4, 8], placement=["ep_balanced"])
    value = ExactObjective(made, made.groups)(np.array([[0.5]]))[0][0]
    logs = []
    for tokens in (4, 8):
        scenario = made.scenario_at({DIE: float(made.numbers([0.5])[DIE]), "workload.batch_tokens": tokens})
        inputs = inputs_of(scenario, layers="3")
        logs.append(np.log(score(inputs, made.strategies[0], inputs.evaluation_batches).total.mean()))
    assert value == pytest.approx(np.mean(logs), rel=1e-5)


# The parts of the search, on functions with kinks whose optima are known.


class Kinked(ExactObjective):
    """max(log 1/x, log 2/y) with x + y <= 9 in bounds of 1 to 9: x = 3, y = 6, where both sides of the kink meet."""

    def __init__(self, problem):
        self.problem, self.names = problem, ["kinked"]

    def __call__(self, positions):
        numbers = 9.0**positions
        sides = np.log(np.array([1, 2]) / numbers)
        which = sides.argmax(axis=1)
        return sides.max(axis=1), -np.log(9) * np.eye(2)[which]


@pytest.fixture
def kinked(problem):
    bounds = {key: {"from": 1, "to": 9, "scale": "log"} for key in (DIE, LINK)}
    return Kinked(problem(variables=bounds, constraints=[f"{DIE} + {LINK} <= 9"], placement=["tp"]))


@pytest.mark.parametrize("start", [(0.0, 0.0), (1.0, 1.0), (0.1, 0.9)])
def test_an_optimum_at_a_kink_is_found_and_known_for_one(kinked, start):
    (found,) = local_optima(kinked, np.array([start]), quiet)
    np.testing.assert_allclose(9**found.position, [3, 6], rtol=2e-3)
    assert found.stationarity.residual < 2e-3
    # The objective is log(3 / C) at the optimum for x + y <= C: 1 % more of the limit is 1 % less.
    assert found.stationarity.multipliers == pytest.approx([1], rel=5e-3)


def test_what_is_no_optimum_is_known_for_none(kinked):
    at = np.array([0.2, 0.2])
    value, slope = kinked(at[None])
    excess, slopes = (each[0] for each in kinked.problem.excess_and_slope(at[None]))
    assert stationarity(kinked.problem, at, [Cut(at, value[0], slope[0])], excess, slopes).residual > 1


# What cannot be descended over.


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"variables": {"hardware.die.compute_TFLOP_per_s": BOUNDS[DIE]}}, "did you mean.*compute_TFLOPs_per_s"),
        ({"variables": BOUNDS, "constraints": ["hardware.die.aria <= 3"]}, "'hardware.die.aria' in an expression"),
        ({"variables": BOUNDS, "constraints": [f"{PRICE} <= 0.04"]}, r"no machine.*at best 0\.05 against 0\.04"),
        ({"variables": BOUNDS, "constraints": [f"{DIE} * ({LINK} < 5) <= 3"]}, "decides by numbers that descend"),
        ({"variables": {"workload.batch_tokens": {"from": 4, "to": 8}}}, "workload.batch_tokens is a whole number"),
        ({"variables": {"hardware.die.memory_capacity_GB": {"from": 1, "to": 2}}}, "decides the form of the run"),
        ({"variables": BOUNDS, "placement": ["hybrid_ring"]}, "hybrid_ring, which is not comparable"),
        ({"variables": BOUNDS, "placement": ["ep_best"]}, "placement has 'ep_best'"),
    ],
)
def test_a_space_that_cannot_be_searched_is_one_clear_error(problem, sections, told):
    with pytest.raises(ValueError, match=f"(?is)space.yaml.*{told}|{told}"):
        feasible_starts(problem(**sections), 4)


def test_fixed_values_and_variables_exclude_each_other(problem, scenario):
    made = problem(variables=BOUNDS, placement=["tp"])
    with pytest.raises(MachineSearchError, match=f"--set {LINK}: space.yaml has it as a variable"):
        hardware_problem(made.file, scenario, {LINK: 3}, None)


def test_sides_that_both_vary_are_compared_where_they_are(problem):
    """0.1 against 4 * 0.01: broken by 60 % of the larger side, wherever in the bounds that is."""
    made = problem(variables=BOUNDS, constraints=[f"{LINK} <= 4 * {DIE}"], **QUICK)
    assert np.asarray(made.excess(full(2, 0.0))) == pytest.approx([0.6], rel=1e-5)


def test_what_is_derived_from_constants_is_a_limit(problem):
    made = problem(variables=BOUNDS, derived={"budget": "0.5 * 3"}, constraints=[f"{PRICE} <= budget"], **QUICK)
    assert made.limit(made.constraints[0]) == 1.5


def test_a_side_that_is_no_number_is_one_error(problem):
    with pytest.raises(MachineSearchError, match="area_mm2' is None, no number"):
        problem(variables=BOUNDS, constraints=["hardware.die.area_mm2 <= 5"], **QUICK)


def test_a_design_that_meets_no_constraint_is_never_the_best(problem):
    """Steep constraints are broken on the way; what is returned meets them."""
    made = problem(variables=BOUNDS, constraints=[f"({PRICE}) ** 8 <= 25"], **QUICK)
    (optimum,) = local_optima(ExactObjective(made, made.groups), np.full((1, 2), 0.9), quiet)
    assert np.isinf(optimum.value) or np.asarray(made.excess(jnp.asarray(optimum.position))).max() <= 1e-3
