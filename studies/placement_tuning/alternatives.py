"""Ablations: other relaxations, roundings and searches in the place of the tuner's own, on a few layers.

Each alternative replaces one part of the tuner and leaves the rest as it is. They live here because the
package keeps only what won. Results gather at the lowest-numbered host, the one exchange that may be chosen.
"""

import time
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import jax
import numpy as np
import scipy.sparse as sp
from cases import CASES, HERE, ROOT, SCENARIOS, Run
from scipy.optimize import linprog

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.placement.strategies import expert_parallel_random
from jaxmoe.tune import History, TunerSettings, tune, tuner
from jaxmoe.tune.descent import GroupedPlan, TransportPlan

LAYERS = {CASES[0]: "0,7", CASES[2]: "11,21"}  # an even and a skewed one
SETTINGS = {"restarts": 4, "steps": 300, "batches_per_step": 4, "descent_cuts": 0}
SETTINGS |= {"refine_steps": 500, "refine_batches": 32}


def expert_softmax(plan, frequency, node_part, temperature, budget_spread):
    """Every expert spread over nodes by its own softmax: nothing keeps nodes evenly loaded."""
    return jax.nn.softmax(plan.logits / temperature, axis=1)


def node_softmax(plan, frequency, node_part, temperature, budget_spread):
    """Every node filled with experts by its own softmax, then experts scaled to be whole."""
    work = node_part * jax.nn.softmax(plan.logits / temperature, axis=0)
    return work / (work.sum(axis=1, keepdims=True) + 1e-12)


def part_of_work(plan, frequency, nodes):
    """Soft hosts by the work they do, whoever's it is: hosts of cold experts are hardly seen."""
    return 1 / (frequency * nodes)


def vertex(share, least_part):
    """The vertex of the transport polytope nearest to each plan in entropy; margins as the plan has them."""
    plans = np.maximum(share, 1e-9).reshape(-1, *share.shape[-2:])
    return np.stack([_vertex(plan) for plan in plans]).reshape(share.shape)


def _vertex(plan: np.ndarray) -> np.ndarray:
    experts, nodes = plan.shape
    rows = sp.kron(sp.eye(experts), np.ones((1, nodes)))
    columns = sp.kron(np.ones((1, experts)), sp.eye(nodes))
    margins = np.concatenate([plan.sum(axis=1), plan.sum(axis=0)])
    equal = sp.vstack([rows, columns], format="csr")[:-1]
    solved = linprog(-np.log(plan).ravel(), A_eq=equal, b_eq=margins[:-1], method="highs").x.reshape(plan.shape)
    kept = np.where(solved < 1e-6, 0, solved)
    return kept / kept.sum(axis=1, keepdims=True)


def random_starts(run, exchange, starts) -> tuple[np.ndarray, np.ndarray, History]:
    """Random expert parallelism where the descent would have been."""
    layers, experts = run.problem.frequency.shape
    plans = [expert_parallel_random(layers, experts, run.problem.num_nodes, seed) for seed in range(4)]
    history = History()
    history.add(0, np.full(layers, np.nan))
    return np.stack(plans, axis=1).astype(float), history.seconds[-1], history


def no_strategies(run) -> np.ndarray:
    """No shipped strategy to start from, for it would hide what the searches find."""
    layers, experts = run.problem.frequency.shape
    return np.zeros((layers, 0, experts, run.problem.num_nodes))


ALTERNATIVES: dict[str, tuple[dict, list]] = {
    "the tuner": ({}, []),
    "no local search": ({"refine_steps": 0}, []),
    "2 batches per step": ({"batches_per_step": 2}, []),
    "learning rate 0.02": ({"learning_rate": 0.02}, []),
    "one restart": ({"restarts": 1}, []),
    "warm end (temperature 0.2)": ({"sinkhorn_temperature": (1.0, 0.2)}, []),
    "wide end (support width 0.3)": ({"support_width": (1.0, 0.3)}, []),
    "support width of the work alone": ({}, [(GroupedPlan, "typical_part", part_of_work)]),
    "rounding to a transport vertex": ({}, [(tuner, "keep_hosts", vertex)]),
    "softmax over nodes per expert": ({}, [(TransportPlan, "share", expert_softmax)]),
    "softmax over experts per node": ({}, [(TransportPlan, "share", node_softmax)]),
    "local search alone, from random EP": ({"refine_steps": 2000}, [(tuner._Run, "descend", random_starts)]),
}


def rows(run: Run, name: str) -> list[dict]:
    """Every alternative on the layers of one case: mean times, s, and wall seconds."""
    case = next(case for case in LAYERS if case.name == name)
    scenario = SCENARIOS / f"{name}.yaml"
    inputs = read_inputs(scenario, ["tuning.exchanges=[]"], run.trace(case.model), LAYERS[case])
    made = []
    for alternative, (settings, patches) in ALTERNATIVES.items():
        jax.clear_caches()  # compiled code holds on to what was patched
        with ExitStack() as stack:
            stack.enter_context(patch.object(tuner._Run, "shipped_starts", no_strategies))
            for target, attribute, replacement in patches:
                stack.enter_context(patch.object(target, attribute, replacement))
            begun = time.perf_counter()
            result = tune(placement_problem(inputs), TunerSettings(**(SETTINGS | settings)))
        stages = {stage: f"{seconds.mean():.6e}" for stage, seconds in result.stages.items()}
        made.append(
            {"case": case.name, "alternative": alternative} | stages | {"wall_s": f"{time.perf_counter() - begun:.1f}"}
        )
    return made


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, ROOT.parent / "shared", "traces")
    given = parser.parse_args()
    cases = [(case.name,) for case in LAYERS]
    make_tables(HERE, [Table("alternatives", partial(rows, Run(given.shared)), cases, ("case",))], given)
