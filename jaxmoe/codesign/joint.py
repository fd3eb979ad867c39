"""Machine and placement together: numbers and a transport plan of the experts descend side by side."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.codesign import descent as hardware
from jaxmoe.codesign.problem import HardwareProblem, model_numbers
from jaxmoe.config import build_tuner_settings
from jaxmoe.experiment.comparison import placement_problem, tuned_strategies
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy, strategy
from jaxmoe.network import AbstractExchange
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem, TuneResult, TunerSettings
from jaxmoe.tune.descent import (
    SEGMENT,
    Annealed,
    Landscape,
    TransportPlan,
    landscape,
    random_plans,
    relaxed_objective,
    segment_batches,
)
from jaxmoe.tune.descent import schedule as annealed
from jaxmoe.tune.settings import STEP_PRODUCTS
from jaxmoe.tune.tuner import gathering, tune

SHIPPED = "shipped"  # the best strategy of every layer, under its best exchange


@dataclass(frozen=True)
class Joint:
    """Where the descents ended: positions [start, variable], relaxed shares [layer, start, expert, node], and the
    objective of every step and start."""

    positions: Float[np.ndarray, "start variable"]
    shares: Float[np.ndarray, "layer start expert node"]
    history: Float[np.ndarray, "step start"]
    batches_per_step: int


class Given(NamedTuple):
    """Arguments of a segment."""

    land: Landscape  # whose model has the numbers of one machine
    exchange: AbstractExchange


def descend(problem: HardwareProblem, inputs: Inputs, starts: np.ndarray, report: hardware.Progress) -> Joint:
    """Descend from all starts [start, variable], each with a random plan of its own, in one compiled function.

    `inputs` are of a good machine: its fastest exchange of plans without preference is descended under.
    """
    placed, settings = _placement(problem, inputs), build_tuner_settings(inputs.scenario.tuning)
    exchange = placed.gathers[gathering(placed, settings.seed)]
    steps = -(-problem.space.steps // SEGMENT) * SEGMENT
    given = Given(landscape(placed, settings.budget_spread, settings.learning_rate), exchange)
    count, layers = len(starts), len(placed.frequency)
    batches_per_step = _affordable(placed, settings, count * steps)
    plans = random_plans(problem.space.seed, layers, count, placed.trace.num_experts, placed.num_nodes)
    by_start = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), plans)
    at = {"position": jnp.asarray(starts, jnp.float32), "plan": by_start}
    walk = hardware.begun(at, len(problem.constraints), (count,))
    segment = _segment(problem)
    ends = {
        "temperature": settings.sinkhorn_temperature,
        "width": settings.support_width,
        "max_temperature": settings.max_temperature,
    }
    seeds, history = np.random.default_rng([problem.space.seed, 2]), []
    for first in range(0, steps, SEGMENT):
        report("descend with placement", first, steps)
        batches = segment_batches(
            placed.under(exchange), batches_per_step, int(seeds.integers(2**62)), settings.descent_tokens
        )
        now = annealed(first, steps, ends)
        walk, values = segment(walk, given, batches, hardware.schedule(first, steps), now)
        history.append(np.asarray(values, float))
    report("descend with placement", steps, steps)
    shares = _shares(given.land, walk.at["plan"], now.temperature[-1])
    positions = np.asarray(walk.at["position"], float)
    return Joint(positions, np.moveaxis(np.asarray(shares, float), 0, 1), np.concatenate(history), batches_per_step)


def _affordable(placed: PlacementProblem, settings: TunerSettings, walked: int) -> int:
    """Batches of a step, fewer where they would take minutes."""
    entries = min(placed.batch_tokens, settings.descent_tokens) * placed.trace.num_experts * placed.num_nodes
    return int(np.clip(STEP_PRODUCTS / (walked * entries), 1, settings.batches_per_step))


def _segment(problem: HardwareProblem) -> Any:
    (setting,) = problem.settings

    def objective(at: Any, given: Given, batches: Batch, now: Annealed) -> Float[Array, ""]:
        """The logarithm of the relaxed time, mean over layers, with what overfull memory costs."""
        land, numbers = given.land, problem.numbers(at["position"])
        model = setting.model(model_numbers(setting, numbers), land.model)
        land = land._replace(model=replace(model, exchange=given.exchange))
        layers = jax.vmap(relaxed_objective, in_axes=(0, None, 0, 0, None))
        return jnp.log(layers(at["plan"], land, land.frequency, batches, now).mean() * land.scale)

    @jax.jit
    def segment(
        walk: hardware.Walk, given: Given, batches: Batch, moments: hardware.Moment, schedule: Annealed
    ) -> tuple[hardware.Walk, Float[Array, "step start"]]:
        def step(walk: hardware.Walk, each: tuple[Batch, hardware.Moment, Annealed]):
            drawn, moment, now = each
            # As in the tuner, a plan's steps shrink with its temperature, not with those of the machine.
            rate = given.land.learning_rate * now.temperature / moment.rate
            rates = {"position": jnp.ones(()), "plan": jax.tree.map(lambda leaf: rate, walk.at["plan"])}
            return jax.vmap(
                lambda one: hardware.moved(problem, one, moment, lambda at: objective(at, given, drawn, now), rates)
            )(walk)

        return jax.lax.scan(step, walk, (batches, moments, schedule))

    return segment


@jax.jit
def _shares(
    land: Landscape, plans: TransportPlan, temperature: Float[Array, ""]
) -> Float[Array, "start layer expert node"]:
    def share(plan: TransportPlan, frequency: Float[Array, " expert"]) -> Float[Array, "expert node"]:
        return plan.share(frequency, land.node_part, temperature, land.budget_spread)

    return jax.vmap(lambda plan: jax.vmap(share)(plan, land.frequency))(plans)


def _placement(problem: HardwareProblem, inputs: Inputs) -> PlacementProblem:
    """What the placement is tuned for: the space's objective, the mean or the 95th percentile."""
    return replace(placement_problem(inputs), p95_weight=float(problem.space.objective == "p95"))


def rounded(
    problem: HardwareProblem, inputs: Inputs, relaxed: np.ndarray, report: hardware.Progress
) -> tuple[TuneResult, list[Strategy]]:
    """Relaxed plans [layer, start, expert, node] rounded, improved and compared by the tuner at a machine's numbers.

    Returns its result, and what it found as strategies: the plan, what the search ended with where that is another,
    and the best shipped strategies. Ctrl-C raises `KeyboardInterrupt` when the tuner has ended.
    """
    result = tune(_placement(problem, inputs), build_tuner_settings(inputs.scenario.tuning), report, relaxed)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    found = tuned_strategies(inputs, result)
    if result.shipped is not None:
        found.append(strategy(inputs, SHIPPED, result.shipped.plan, result.shipped.exchange.tolist()))
    return result, found
