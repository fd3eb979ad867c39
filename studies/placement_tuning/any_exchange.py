"""What a new exchange could give, where tuning gains nothing and `gaps.csv` has deals that may be 10 % faster.

There, deals of experts were given the least that the links of single nodes allow. Here they are given the least that
trees allow (`tree_bound`), the larger of the two in every batch; and beside it what an exchange takes that chooses a
tree for every token by the loads (`balanced_trees`) on the first of the batches; none such ships. Only deals are looked
at that by the bound of `gaps.csv` may be more than 10 % faster than the tuned plan, with hindsight, on the batches that
judge.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import jax
import numpy as np
from cases import Run
from exchange_bound import exchange_bound
from gaps import FAR, far_cells, plans_of
from machines import inputs_of
from scoring import MICRO, Plan, timed
from tree_bound import balanced_trees, tree_bound

from jaxmoe.experiment.inputs import Inputs
from jaxmoe.files import read_table
from jaxmoe.traces import Batch

GAIN = 1.001  # shipped / tuned, from which on it is one
ROUTED = 4096  # tokens, in as many batches as that takes, get trees
COLUMNS = (
    "job",
    "machine",
    "model",
    "batch_tokens",
    "groups",
    "plan",
    "compute_us",
    "nodes_us",
    "trees_us",
    "least_total_us",
    "balanced_us",
    "balanced_total_us",
)


class Bounded(NamedTuple):
    """A plan, its mean seconds of compute, and those that any exchange takes at least by single nodes and by trees."""

    plan: Plan
    compute: float
    nodes: float
    trees: float
    least: float  # of all: the larger bound of every batch

    @property
    def columns(self) -> dict[str, str]:
        seconds = {"compute_us": self.compute, "nodes_us": self.nodes, "trees_us": self.trees}
        return {name: f"{MICRO * s:.4f}" for name, s in (seconds | {"least_total_us": self.least}).items()}


def open_cells(run: Run) -> dict[tuple[str, str, int], float]:
    """Cells without a gain, still far above what the deals of `gaps.csv` could take; and the tuned plan's seconds."""
    path = run.table("gaps")
    if not path.is_file():
        return {}
    deals, cells = read_table(path), {}
    for row in far_cells(run):
        at = (row["machine"], row["model"], row["batch_tokens"])
        of = [float(deal["least_total_us"]) for deal in deals if at == tuple(deal[key] for key in COLUMNS[1:4])]
        gains = float(row["shipped_over_tuned"]) > GAIN
        if of and not gains and float(row["tuned_us"]) >= FAR * min(of):
            cells[row["machine"], row["model"], int(row["batch_tokens"])] = float(row["tuned_us"]) / MICRO
    return cells


def bounded(inputs: Inputs, plan: Plan, batches: Batch, below: float) -> Bounded | None:
    """The plan with its bounds, if by single nodes alone it may take less than `below` seconds."""
    compute = float(timed(inputs, plan, plan.exchanges[0], inputs.evaluation_batches).time.compute.mean())
    nodes = exchange_bound(inputs.model, plan.share, batches)
    if compute + nodes.mean() >= below:
        return None
    trees = tree_bound(inputs.model, plan.share, batches)
    least = compute + float(np.maximum(nodes, trees).mean())
    return Bounded(plan, compute, float(nodes.mean()), float(trees.mean()), least)


def rows(machine: str, model: str, tokens: int, tuned: float, run: Run) -> list[dict]:
    """One row for every number of groups: the deal with the least bound."""
    inputs = inputs_of(machine, model, tokens, run)
    batches = jax.tree.map(lambda leaf: leaf[0], inputs.evaluation_batches)
    first = jax.tree.map(lambda leaf: leaf[: max(1, ROUTED // tokens)], batches)
    made = []
    for groups, plans in groupby(plans_of(inputs), key=lambda given: given[0]):
        alike = [found for _, plan in plans if (found := bounded(inputs, plan, batches, tuned / FAR))]
        if not alike:
            continue
        best = min(alike, key=lambda each: each.least)
        balanced = float(balanced_trees(inputs.model, best.plan.share, first).mean())
        row = {"machine": machine, "model": model, "batch_tokens": tokens, "groups": groups, "plan": best.plan.name}
        row |= best.columns | {"balanced_us": f"{MICRO * balanced:.4f}"}
        made.append(row | {"balanced_total_us": f"{MICRO * (best.compute + balanced):.4f}"})
    return made


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every cell that is still open."""
    return {
        "any_exchange_" + "_".join(map(str, at)): lambda at=at, tuned=tuned: rows(*at, tuned, run)
        for at, tuned in open_cells(run).items()
    }
