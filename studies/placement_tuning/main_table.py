"""The main table: the tuned plan and every other one, each under its own best exchange, on unseen batches.

What is best, of exchanges and of ways to cut the machine, is found on batches that tuning may see, for all alike.
Three times: with every named exchange, without trees in the network, and as hd_moe publishes it, where results gather
at the lowest-numbered host and nothing else may be chosen.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from cases import CASES, GIVEN_EXCHANGES, Case, Run
from scoring import QUICK, SEED, TREES, UNICASTS, Plan, Timed, timed, under_best, usual_plans

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.tune import PlacementProblem, tune
from jaxmoe.tune.bounds import lower_bound

COLUMNS = (
    "job",
    "case",
    "layer",
    "trees",
    "strategy",
    "plan",
    "exchange",
    "total_us",
    "compute_us",
    "communication_us",
    "over_tuned",
    "bound_us",
    "wall_s",
)
PUBLISHED_SETTING = "lowest_host"
KINDS = {"yes": (*UNICASTS, *TREES), "no": UNICASTS, PUBLISHED_SETTING: (PUBLISHED_SETTING,)}


def gathers_of(trees: str, quick: bool) -> tuple[str, ...]:
    """The exchanges for any plan."""
    return tuple(name for name in KINDS[trees] if not quick or name in QUICK)


def best_usual(case: Case, inputs: Inputs, trees: str, run: Run) -> dict[str, Timed]:
    """All but the tuned plan, each strategy with the plan and the exchange that are best on batches to tune on."""
    problem, gathers = placement_problem(inputs), gathers_of(trees, run.quick)
    seen = problem.draw(inputs.scenario.evaluation.batches, SEED)
    plans = usual_plans(problem, gathers, rings=trees != PUBLISHED_SETTING)
    published = case.published_share(run, inputs)
    if published is not None:
        plans = {"published": [Plan("published", published, gathers)]} | plans
    return {name: under_best(inputs, some, seen) for name, some in plans.items()}


def problem_of(inputs: Inputs, trees: str, usual: dict[str, Timed]) -> PlacementProblem:
    """The tuner may choose its default exchanges, and those under which any other plan is best."""
    problem = placement_problem(inputs)
    if trees == PUBLISHED_SETTING:
        return replace(problem, exchanges=())
    default = (name for name in GIVEN_EXCHANGES if name not in TREES or trees == "yes")
    others = (best.exchange for best in usual.values() if inputs.exchange(best.exchange).groups <= 1)
    return replace(problem, exchanges=tuple(dict.fromkeys((*default, *others))))


def compared(case: Case, inputs: Inputs, trees: str, run: Run) -> tuple[dict[str, Timed], PlacementProblem]:
    """Every strategy on unseen batches, the tuned plan first."""
    usual = best_usual(case, inputs, trees, run)
    problem = problem_of(inputs, trees, usual)
    result = tune(problem, run.settings)
    chosen = {"tuned": (Plan("tuned", result.share[0], result.exchange), result.exchange[0])}
    chosen |= {name: (best.plan, best.exchange) for name, best in usual.items()}
    return {name: timed(inputs, *one, inputs.evaluation_batches) for name, one in chosen.items()}, problem


def main_rows(case: Case, layer: int, trees: str, run: Run) -> Iterator[dict]:
    """All strategies of one layer."""
    begun, inputs = time.perf_counter(), case.inputs(run, layer)
    found, problem = compared(case, inputs, trees, run)
    bound = float(lower_bound(problem, inputs.evaluation_batches)[0])
    wall = time.perf_counter() - begun
    for name, best in found.items():
        row = {"case": case.name, "layer": layer, "trees": trees, "strategy": name, "plan": best.plan.name}
        row |= best.columns | {"over_tuned": f"{best.seconds / found['tuned'].seconds:.5f}"}
        yield row | {"bound_us": f"{1e6 * bound:.4f}", "wall_s": f"{wall:.1f}"}


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every case, layer and kind of exchanges."""
    made = {}
    for case in CASES:
        # The published setting has no latency, and is for the cases that have a plan of their own.
        own = case.published == f"{float(case.tflops)}tflops_{float(case.gbps)}gbps" and not case.latency_ns
        for layer in case.layers(run.layers_step):
            for trees in ("yes", "no", *([PUBLISHED_SETTING] if own else [])):
                made[f"main_{case.name}_{layer}_{trees}"] = lambda at=(case, layer, trees): list(main_rows(*at, run))
    return made
