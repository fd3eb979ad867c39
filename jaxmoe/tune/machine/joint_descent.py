"""Machine, placement, token layout and gate together: numbers, a transport plan of the experts, a choice among
exchanges and a bias descend side by side.

The choice is relaxed: every exchange that may be chosen is priced, and times are weighed by a softmax that sharpens as
the plan does. Where the placement problem's plans have copies, a plan's shares are whole experts and their replicas.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem, TunerSettings
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
from jaxmoe.tune.machine import augmented_lagrangian as hardware
from jaxmoe.tune.machine.gate_table import RATE, Gated, lost
from jaxmoe.tune.machine.problem import AbstractMachineProblem, Progress
from jaxmoe.tune.settings import STEP_PRODUCTS


@dataclass(frozen=True)
class Joint:
    """Where the descents ended: positions, relaxed shares, the exchange of most layers by its name, tables of the
    gate's bias where there is one, and the objective of every step and start."""

    positions: Float[np.ndarray, "start variable"]
    shares: Float[np.ndarray, "layer start expert node"]
    exchanges: list[str]  # by start
    tables: Float[np.ndarray, "layer start node expert"] | None
    history: Float[np.ndarray, "step start"]
    batches_per_step: int


class SegmentArguments(NamedTuple):
    """Arguments of one compiled segment of descent: the relaxed objective, and the exchanges to choose among."""

    land: Landscape  # whose model has the numbers of one machine
    exchanges: tuple[AbstractExchange, ...]  # among which a layer chooses


def descend(
    problem: AbstractMachineProblem,
    placed: PlacementProblem,
    settings: TunerSettings,
    starts: Float[np.ndarray, "start variable"],
    gate_loss: float | None,
    report: Progress,
) -> Joint:
    """Descend from all starts, each with a random plan of its own, in one compiled function.

    Starts lean towards one exchange each, in turn. With a `gate_loss`, the part of the gate's mass that may be lost, a
    bias of the gate descends as well, from none. `placed` is the placement problem on any machine of the search.
    """
    names, exchanges = [*placed.gathers], tuple(placed.gathers.values())
    steps = -(-problem.steps // SEGMENT) * SEGMENT
    given = SegmentArguments(landscape(placed, settings.budget_spread, settings.learning_rate), exchanges)
    count, layers = len(starts), len(placed.frequency)
    batches_per_step = _affordable(placed, settings, count * steps * len(names))
    plans = random_plans(problem.seed, layers, count, placed.trace.num_experts, placed.num_nodes)
    by_start = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), plans)
    leaning = jax.nn.one_hot(np.arange(count) % len(names), len(names))
    layout = jnp.broadcast_to(leaning[:, None], (count, layers, len(names)))
    at = {"position": jnp.asarray(starts, jnp.float32), "plan": by_start, "layout": layout}
    gate = gate_loss is not None
    if gate:
        at["gate"] = jnp.zeros((count, layers, placed.num_nodes, placed.trace.num_experts))
    walk = hardware.begun(at, len(problem.constraints) + gate, (count,))
    segment = _segment(problem, gate_loss)
    ends = {
        "temperature": settings.sinkhorn_temperature,
        "width": settings.support_width,
        "max_temperature": settings.max_temperature,
    }
    seeds, history = np.random.default_rng([problem.seed, 2]), []
    # What one exchange may merge another may not.
    alike = exchanges[0] if len(names) == 1 else build_exchange("token_home", placed.model.machine.topology)
    for first in range(0, steps, SEGMENT):
        report("descend with placement", first, steps)
        batches = segment_batches(
            placed.under(alike), batches_per_step, int(seeds.integers(2**62)), settings.descent_tokens
        )
        now = annealed(first, steps, ends)
        walk, values = segment(walk, given, batches, hardware.schedule(first, steps), now)
        history.append(np.asarray(values, float))
    report("descend with placement", steps, steps)
    shares = _shares(given.land, walk.at["plan"], now.temperature[-1])
    positions = np.asarray(walk.at["position"], float)
    tables = np.moveaxis(np.asarray(walk.at["gate"]), 0, 1) if gate else None
    shares = np.moveaxis(np.asarray(shares, float), 0, 1)
    chosen = [Counter(each).most_common(1)[0][0] for each in np.asarray(walk.at["layout"]).argmax(axis=2).tolist()]
    return Joint(positions, shares, [names[at] for at in chosen], tables, np.concatenate(history), batches_per_step)


def _affordable(placed: PlacementProblem, settings: TunerSettings, walked: int) -> int:
    """Batches of a step, fewer where they would take minutes."""
    entries = min(placed.batch_tokens, settings.descent_tokens) * placed.trace.num_experts * placed.num_nodes
    return int(np.clip(STEP_PRODUCTS / (walked * entries), 1, settings.batches_per_step))


def _segment(problem: AbstractMachineProblem, limit: float | None) -> Any:
    def objective(
        at: Any, given: SegmentArguments, batches: Batch, now: Annealed
    ) -> tuple[Float[Array, ""], Float[Array, " further"]]:
        """The logarithm of the relaxed time, mean over layers, with what overfull memory costs; and by how much the
        gate loses too much."""
        land = given.land
        model = problem.model(problem.numbers(at["position"]), land.model)
        layers = jax.vmap(relaxed_objective, in_axes=(0, None, 0, 0, None))
        plans = at["plan"] if limit is None else Gated(at["plan"], at["gate"])

        def under(exchange: AbstractExchange) -> Float[Array, " layer"]:
            own = land._replace(model=replace(model, exchange=exchange))
            return layers(plans, own, land.frequency, batches, now)

        times = jnp.stack([under(exchange) for exchange in given.exchanges], axis=-1)
        parts = jax.nn.softmax(at["layout"] / now.temperature, axis=-1)
        value = jnp.log((parts * times).sum(axis=-1).mean() * land.scale)
        if limit is None:
            return value, jnp.zeros(0)
        away = jax.vmap(lambda gated, batches: lost(gated.gate, batches))(plans, batches)
        return value, away.mean(keepdims=True) / limit - 1

    @jax.jit
    def segment(
        walk: hardware.Walk, given: SegmentArguments, batches: Batch, moments: hardware.Moment, schedule: Annealed
    ) -> tuple[hardware.Walk, Float[Array, "step start"]]:
        def step(walk: hardware.Walk, each: tuple[Batch, hardware.Moment, Annealed]):
            drawn, moment, now = each
            # As in the tuner, a plan's steps shrink with its temperature, not with those of the machine.
            rate = given.land.learning_rate * now.temperature / moment.rate
            rates = {"position": jnp.ones(()), "plan": jax.tree.map(lambda leaf: rate, walk.at["plan"]), "layout": rate}
            rates |= {"gate": RATE / moment.rate} if "gate" in walk.at else {}
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
