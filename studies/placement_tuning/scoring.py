"""Plans of one layer, each under its own best exchange."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.network import build_exchange
from jaxmoe.placement.exchange import HOMES, ROUTES
from jaxmoe.placement.strategies import shipped_strategies
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem

UNICASTS = (*HOMES, "reduce_scatter")
TREES = tuple(f"{home}_{route}" for home in HOMES for route in ROUTES if route != "unicast")
QUICK = ("lowest_host", "least_loaded", "corner_host_split_tree", "reduce_scatter")  # in a trial
MICRO = 1e6
SEED = 0


class Plan(NamedTuple):
    """Shares of one layer, [expert, node], and the names of the exchanges that it may have."""

    name: str
    share: np.ndarray
    exchanges: tuple[str, ...]


class Timed(NamedTuple):
    """A plan under an exchange: mean times over batches."""

    plan: Plan
    exchange: str
    time: LayerTime

    @property
    def seconds(self) -> float:
        return float(self.time.total.mean())

    @property
    def columns(self) -> dict[str, str]:
        """The times as tables have them."""
        parts = {"total_us": self.time.total, "compute_us": self.time.compute}
        parts |= {"communication_us": self.time.communication}
        return {"exchange": self.exchange} | {name: f"{MICRO * float(s.mean()):.4f}" for name, s in parts.items()}


class Found(NamedTuple):
    """A plan of one layer, what it solves, and its exchange."""

    problem: PlacementProblem
    share: np.ndarray  # [1, expert, node]
    exchange: str
    served_by: str = ""  # the rule by which one of several copies serves

    def judged(self, batches: Batch) -> LayerTime:
        """Times on batches whose choices name experts."""
        problem, share = self.problem, jnp.asarray(self.share, jnp.float32)
        serving = None if problem.serving is None else jax.tree.map(lambda leaf: leaf[None], problem.serving)
        exchange = build_exchange(self.exchange, problem.model.machine.topology)
        return evaluate(problem.model, share, problem.served(batches), exchange, serving=serving).as_numpy()


def timed(inputs: Inputs, plan: Plan, exchange: str, batches: Batch) -> Timed:
    """A plan under one exchange on batches whose leaves are [1, batch, ...]."""
    share = jnp.asarray(plan.share, jnp.float32)[None]
    return Timed(plan, exchange, evaluate(inputs.model, share, batches, inputs.exchange(exchange)).as_numpy())


def under_best(inputs: Inputs, plans: Iterable[Plan], batches: Batch) -> Timed:
    """The fastest of some plans, each under all its exchanges."""
    return min(
        (timed(inputs, plan, exchange, batches) for plan in plans for exchange in plan.exchanges),
        key=lambda each: each.seconds,
    )


def usual_plans(problem: PlacementProblem, gathers: Sequence[str], rings: bool = True) -> dict[str, list[Plan]]:
    """What is compared, by strategy: the plans that it may choose among."""
    topology = problem.model.machine.topology
    shipped = shipped_strategies(problem.frequency, topology, tuple(gathers), SEED)
    plans = {each.name: Plan(each.name, each.share[0], each.exchanges) for each in shipped}
    hybrids = [plan for plan in plans.values() if "hybrid" in plan.name]
    gathered = {name: [plans[name]] for name in ("ep", "ep_balanced")}
    if not rings:
        return {"tp": [plans["tp"]._replace(exchanges=tuple(gathers))], **gathered}
    both_ways = plans["tp"]._replace(exchanges=("ring_both_ways",))
    return {"tp_both_ways": [both_ways], "tp": [plans["tp"]], "hybrid_complete": hybrids, **gathered}
