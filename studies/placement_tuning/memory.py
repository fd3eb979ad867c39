"""What memory buys: plans with one, two and four copies of every expert, with and without `least_congested`.

Each row is of one layer at equal bytes. `regions` is the best plan of regions as it is (with one copy: the best shipped
strategy) under its best exchange, first among the exchanges that tuning has by default, then with `least_congested` as
well, which its name says. The rule by which copies serve is the better of two: where a token lives, or the region that
has done least. `tuned` is what tuning ends with, with both. All is chosen on batches that tuning may see, and judged on
others of the same text; what deciding takes is not charged.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from cases import DEEPSEEK, MIXTRAL, Case, Run
from machines import inputs_of
from scoring import MICRO, SEED

from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.placement.regions import shipped_regions
from jaxmoe.placement.strategies import shipped_strategies
from jaxmoe.tune import PlacementProblem, tune
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.regions import in_regions
from jaxmoe.tune.results import Plan
from jaxmoe.tune.settings import DEFAULT_EXCHANGES, StopSwitch

COLUMNS = (
    "job",
    "cell",
    "layer",
    "copies",
    "strategy",
    "plan",
    "served_by",
    "exchange",
    "total_us",
    "compute_us",
    "communication_us",
    "experts_per_node",
    "bound_us",
    "wall_s",
)
MACHINE = "nmp_8x8_10TFLOPs_25GBps"  # in the setting of `machines.csv`; the others are those of the main table
CASES = {
    "deepseek-v2-lite_4x8_10TFLOPs_25GBps": Case(DEEPSEEK, "4x8", "10", "25"),
    "deepseek-v2-lite_4x8_5TFLOPs_50GBps": Case(DEEPSEEK, "4x8", "5", "50"),
    "mixtral-8x7b_4x8_10TFLOPs_25GBps": Case(MIXTRAL, "4x8", "10", "25"),
}
COPIES = (1, 2, 4)
CHOSEN = "least_congested"


def cells(run: Run) -> Iterator[tuple[str, int, Callable[[], Inputs]]]:
    """Name, layer and inputs of every layer."""
    yield MACHINE, 13, lambda: inputs_of(MACHINE, DEEPSEEK, 128, run)
    for name, case in CASES.items():
        for layer in case.layers(run.layers_step):
            yield name, layer, lambda case=case, layer=layer: case.inputs(run, layer)


def problem_of(inputs: Inputs, copies: int, chosen: bool) -> PlacementProblem:
    """So many copies of every expert, under the tuner's default exchanges, and maybe those that choose."""
    exchanges = (*DEFAULT_EXCHANGES, CHOSEN) if chosen else DEFAULT_EXCHANGES
    problem = replace(placement_problem(inputs), exchanges=exchanges)
    return problem if copies == 1 else in_regions(problem, copies, SEED)


def judged(inputs: Inputs, problem: PlacementProblem, share: Plan, exchange: str) -> LayerTime:
    """Times of a plan on the unseen batches."""
    serving = None if problem.serving is None else jax.tree.map(lambda leaf: leaf[None], problem.serving)
    batches = problem.served(inputs.evaluation_batches)
    return evaluate(
        inputs.model, jnp.asarray(share, jnp.float32), batches, inputs.exchange(exchange), serving=serving
    ).as_numpy()


def name_of(problem: PlacementProblem, share: Plan) -> str:
    """The name of a shipped plan."""
    topology, gathers = problem.model.machine.topology, tuple(problem.gathers)
    if problem.regions:
        known = shipped_regions(problem.regions, problem.expert_frequency, topology, gathers)
    else:
        known = shipped_strategies(problem.frequency, topology, gathers, SEED)
    return next(each.name for each in known if abs(each.share[0] - share[0]).max() < 1e-6)


def rows(cell: str, layer: int, inputs: Inputs, copies: int, strategy: str, run: Run) -> list[dict]:
    """The one row of a strategy."""
    begun = time.perf_counter()
    problem = problem_of(inputs, copies, strategy != "regions")
    if strategy == "tuned":
        result = tune(problem, run.settings)
        share, exchange, plan = result.share, result.exchange[0], "tuned"
    else:
        with StopSwitch() as stop:
            best = Evaluator(problem, SEED, stop).shipped
        if best is None:
            raise ValueError(f"no plan with {copies} copies fits the memory of {cell}; have fewer copies")
        share, exchange, plan = best.plan, str(best.exchange[0]), name_of(problem, best.plan)
    seen = judged(inputs, problem, share, exchange)
    bound = lower_bound(problem, problem.served(inputs.evaluation_batches))[0]
    row = {"cell": cell, "layer": layer, "copies": copies, "strategy": strategy, "plan": plan, "exchange": exchange}
    row |= {"served_by": problem.served_by if problem.regions else "", "bound_us": f"{MICRO * bound:.4f}"}
    parts = {"total_us": seen.total, "compute_us": seen.compute, "communication_us": seen.communication}
    row |= {name: f"{MICRO * float(seconds.mean()):.4f}" for name, seconds in parts.items()}
    row |= {"experts_per_node": f"{problem.num_experts / problem.num_nodes:g}"}
    return [row | {"wall_s": f"{time.perf_counter() - begun:.1f}"}]


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every row; those of tuning come last."""
    return {
        f"memory_{cell}_{layer}_{copies}_{strategy}": lambda given=(cell, layer, inputs, copies, strategy): rows(
            given[0], given[1], given[2](), *given[3:], run
        )
        for strategy in ("regions", "regions_least_congested", "tuned")
        for cell, layer, inputs in cells(run)
        for copies in COPIES
    }
