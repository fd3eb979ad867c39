"""Who wins on Mixtral's layer: over hop latency, port limit, FLOP-to-bandwidth ratio and batch size.

The tuned plan is tuned once for every ratio, on the machine without latency and port limits, at 128 tokens a batch,
and runs in every cell under the exchange that is best there: a plan tuned for the cell itself could only be better.
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
from cases import FIVE, MIXTRAL, RUNS, Case, Run
from main_table import best_usual, gathers_of, problem_of
from scoring import TREES, Plan, under_best, usual_plans

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.tune import tune

LAYER, BATCHES = 16, 16
RATIOS = (("2.5", "75"), ("5", "50"), ("10", "25"))
LATENCIES_NS = (0, 100, 500, 2000)
PORTS = {"none": 1e6, "2 links": 2.0, "1 link": 1.0}  # times a link's bandwidth; the first never counts
TOKENS = (32, 128, 1024)
COLUMNS = (
    "job",
    "TFLOPs_per_s",
    "GB_per_s",
    "batch_tokens",
    "latency_ns",
    "ports",
    "strategy",
    "plan",
    "exchange",
    "total_us",
    "compute_us",
    "communication_us",
)


def tuned_plan(case: Case, run: Run) -> Plan:
    """The plan tuned for the case's own machine, kept in `runs/`."""
    kept = RUNS / f"sensitivity{'_quick' if run.quick else ''}_{case.name}.npz"
    if not kept.is_file():
        inputs = case.inputs(run, LAYER)
        problem = problem_of(inputs, "yes", best_usual(case, inputs, "yes", run))
        result = tune(problem, run.settings)
        aside = kept.with_suffix(f".{os.getpid()}.npz")
        np.savez(aside, share=result.share[0], exchange=result.exchange[0])
        aside.replace(kept)
    with np.load(kept) as plan:
        return Plan("tuned", plan["share"], (str(plan["exchange"]),))


def cell_rows(case: Case, inputs: Inputs, tuned: Plan, run: Run) -> Iterator[dict]:
    """Every strategy under its best exchange in one cell."""
    gathers = gathers_of("yes", run.quick)
    plans = usual_plans(placement_problem(inputs), gathers)
    (tp,) = plans.pop("tp")
    plans["tp_trees"] = [tp._replace(exchanges=tuple(name for name in gathers if name in TREES))]
    plans["published"] = [Plan("published", case.published_share(run, inputs), gathers)]
    plans["tuned"] = [tuned._replace(exchanges=tuple(dict.fromkeys((*tuned.exchanges, *gathers))))]
    for name, some in plans.items():
        best = under_best(inputs, some, inputs.evaluation_batches)
        yield {"strategy": name, "plan": best.plan.name} | best.columns


def rows(case: Case, tokens: int, run: Run) -> Iterator[dict]:
    """All latencies and ports of one ratio and batch size."""
    tuned = tuned_plan(case, run)
    for latency in LATENCIES_NS[:: 3 if run.quick else 1]:
        for ports, links in PORTS.items():
            rate = links * float(case.gbps)
            limits = [f"hardware.ports.{way}_GB_per_s={rate}" for way in ("injection", "ejection")]
            there = [f"hardware.link.latency_ns={latency}", f"workload.batch_tokens={tokens}", *limits]
            about = {"TFLOPs_per_s": case.tflops, "GB_per_s": case.gbps, "batch_tokens": tokens}
            about |= {"latency_ns": latency, "ports": ports}
            for row in cell_rows(case, case.inputs(run, LAYER, BATCHES, there), tuned, run):
                yield about | row


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every ratio and batch size."""
    cases = [Case(MIXTRAL, "4x8", *ratio, FIVE) for ratio in RATIOS]
    return {
        f"sensitivity_{case.tflops}TFLOPs_{tokens}": lambda at=(case, tokens): list(rows(*at, run))
        for case in cases
        for tokens in TOKENS
    }
