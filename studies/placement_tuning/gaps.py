"""Why no plan is nearer to the bound, where `machines.csv` has one that is more than 10 % above it.

The bound divides work evenly and lets each token visit as few dies as that needs. No shipped deal of experts does
both: spread over all dies, work is even and every token visits every die; the fewer dies hold an expert, the more the
loads of batches differ. For every number of groups that experts may be dealt to there is a row, from tensor parallelism
(one group) to expert parallelism: the best cut under its best exchange of those below, and the least that any cut into
so many groups could take under any exchange. All are judged with hindsight, on the batches that judge the tuned plan.
"""

from collections.abc import Callable
from itertools import groupby

import jax
import numpy as np
from cases import Run
from exchange_bound import exchange_bound
from machines import inputs_of
from scoring import MICRO, SEED, Plan, timed, under_best

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.files import read_table
from jaxmoe.placement.strategies import shipped_strategies

FAR = 1.1  # tuned / bound
EXCHANGES = ("reduce_scatter", "least_loaded")
TREES = tuple(f"{home}_split_tree" for home in ("corner_host", "least_loaded", "random_host", "token_home"))
COLUMNS = (
    "job",
    "machine",
    "model",
    "batch_tokens",
    "groups",
    "plan",
    "exchange",
    "compute_us",
    "communication_us",
    "total_us",
    "least_total_us",
)


def far_cells(run: Run) -> list[dict[str, str]]:
    """Rows of `machines.csv` that are far above the bound."""
    path = run.table("machines")
    if not path.is_file():
        return []
    return [row for row in read_table(path) if float(row["tuned_over_bound"]) > FAR]


def plans_of(inputs: Inputs) -> list[tuple[int, Plan]]:
    """Every shipped plan, with the number of groups that it deals experts to, fewest first."""
    problem = placement_problem(inputs)
    topology = problem.model.machine.topology
    trees = () if topology.crossed() is None else TREES
    plans = [
        (len(np.unique(each.share[0] > 0, axis=0)), Plan(each.name, each.share[0], each.exchanges))
        for each in shipped_strategies(problem.frequency, topology, (*EXCHANGES, *trees), SEED)
    ]
    return sorted(plans, key=lambda given: given[0])


def least_total(inputs: Inputs, plans: list[Plan]) -> float:
    """Mean seconds of compute and of the least that any exchange could take: those of the plan with the least."""
    batches = jax.tree.map(lambda leaf: leaf[0], inputs.evaluation_batches)

    def least(plan: Plan) -> float:
        compute = timed(inputs, plan, plan.exchanges[0], inputs.evaluation_batches).time.compute.mean()
        return float(compute + exchange_bound(inputs.model, plan.share, batches).mean())

    return min(least(plan) for plan in plans)


def rows(machine: str, model: str, tokens: int, run: Run) -> list[dict]:
    """One row for every number of groups."""
    inputs = inputs_of(machine, model, tokens, run)
    made = []
    for groups, plans in groupby(plans_of(inputs), key=lambda given: given[0]):
        alike = [plan for _, plan in plans]
        best = under_best(inputs, alike, inputs.evaluation_batches)
        row = {"machine": machine, "model": model, "batch_tokens": tokens, "groups": groups, "plan": best.plan.name}
        made.append(row | best.columns | {"least_total_us": f"{MICRO * least_total(inputs, alike):.4f}"})
    return made


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every cell that is far above the bound."""
    cells = [(row["machine"], row["model"], int(row["batch_tokens"])) for row in far_cells(run)]
    return {"gaps_" + "_".join(map(str, cell)): lambda at=cell: rows(*at, run) for cell in cells}
