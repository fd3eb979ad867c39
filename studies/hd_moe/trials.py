"""What the Bayesian mapping of HD-MoE finds by trials in place of seconds, and how many the study's runs had.

`python studies/hd_moe/trials.py --shared FOLDER` writes `trials.csv` in some five minutes, and needs the plans that
`study.py` left in `runs/`. The search is the same trial by trial, whatever the machine. So a run of `two_stages.csv` is
found again where the best plan so far has its time on unseen batches; how far it came in 10 s is up to the machine.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from cases import CASES, DEEPSEEK, HERE, MIXTRAL, ROOT, Case, inputs_of
from tuners import SEEDS, plans_of

from jaxmoe.engine import evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.link_balance import GROUP, Budget, bayesian, question_of, scorer
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import silent
from jaxmoe.tune.settings import StopSwitch
from jaxmoe.tune.two_stage import TwoStageSettings

TRIALS = (200, 400, 600)
NEAR = 1e-5  # relative: two times of one plan, of which the table has seven digits
CHOSEN = {(MIXTRAL, "4x8", "5"), (MIXTRAL, "8x8", "5"), (DEEPSEEK, "4x8", "5"), (DEEPSEEK, "4x8", "10")}
Found = list[tuple[int, float]]  # trials after which a plan became the best, and its seconds on unseen batches


def mapped(model: str, mesh: str, tflops: str, gbps: str, shared: Path) -> Iterator[dict]:
    """Plans of every seed after some trials, seconds on unseen batches, beside that of the study's run."""
    case = Case(model, mesh, tflops, gbps)
    inputs = inputs_of(case, shared)
    problem, share = placement_problem(inputs), plans_of(case)["node"][0]
    for seed in SEEDS:
        found = followed(inputs, problem, share, seed)
        run = _run(case, seed)
        told = case.columns | {"seed": seed, "study_s": run, "study_trials": trials_of(found, run)}
        yield told | {f"trials_{trials}_s": best_after(found, trials) for trials in TRIALS}


def followed(inputs: Inputs, problem: PlacementProblem, share: np.ndarray, seed: int) -> Found:
    """The mapping's search as `two_stage` runs it, and what it had found on the way."""
    seen: list[tuple[np.ndarray, float]] = []
    with StopSwitch(None) as stop:
        batches = Evaluator(problem, seed, stop, silent).draw(TwoStageSettings().link_batches)
    question = question_of(problem, share, 0, batches)
    score = scorer(question, GROUP)

    def noted(orders: np.ndarray) -> np.ndarray:
        seconds = score(orders)
        first = int(np.argmin(seconds))
        seen.append((orders[first], float(seconds[first])))
        return seconds

    bayesian(question, seed, Budget(trials=TRIALS[-1]), noted)
    found, best = [], np.inf
    for group, (order, seconds) in enumerate(seen):  # the first is the plan as it is, the others are groups of trials
        if seconds < best:
            best = seconds
            found.append((group * GROUP, _unseen(inputs, share[:, order])))
    return found


def best_after(found: Sequence[tuple[int, float]], trials: int) -> float:
    """Seconds of the plan that was the best after so many trials."""
    return [seconds for begun, seconds in found if begun <= trials][-1]


def trials_of(found: Sequence[tuple[int, float]], seconds: float) -> str:
    """Least and most trials after which the best plan has these seconds; empty where none has."""
    ends = [begun - GROUP for begun, _ in found[1:]] + [TRIALS[-1]]
    for (begun, each), end in zip(found, ends, strict=True):
        if abs(each / seconds - 1) < NEAR:
            return f"{begun} to {end}" if end < TRIALS[-1] else f"{begun} or more"
    return ""


def _unseen(inputs: Inputs, share: np.ndarray) -> float:
    return float(evaluate(inputs.model, jnp.asarray(share[None], jnp.float32), inputs.evaluation_batches).total.mean())


def _run(case: Case, seed: int) -> float:
    (row,) = (
        row
        for row in read_table(HERE / "two_stages.csv")
        if {**row, **case.columns, "optimiser": "milp-bayes", "seed": str(seed)} == row
    )
    return float(row["gathered_s"])


if __name__ == "__main__":
    options = study_options(__doc__, resume=True)
    add_shared(options, ROOT.parent / "shared", "traces")
    given = options.parse_args()
    chosen = [tuple(case.columns.values()) for case in CASES if (case.model, case.mesh, case.tflops) in CHOSEN]
    table = Table("trials", partial(mapped, shared=given.shared), chosen, tuple(CASES[0].columns), digits=7)
    make_tables(HERE, [table], given)
