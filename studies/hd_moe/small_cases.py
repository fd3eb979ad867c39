"""How far every optimiser is from the true optimum, on cases small enough to know it."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
from cases import MIXTRAL, SEED, Case, inputs_of
from optimum import optimum

from jaxmoe.engine import evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.registry import OPTIMISERS
from jaxmoe.tune import PlacementProblem, TunerSettings, tune
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.node_balance import node_balance
from jaxmoe.tune.two_stage import TwoStageSettings, two_stage

MESHES = ("2x2", "2x3")
LAYERS = "0,8,16,24,31"
TOKENS = 512  # in the one batch that counts
SEEDS = (0, 1, 2)
PROOF_S = 60.0  # for each layer
GAMMA, NODE_S, LINK_S = 1.0, 3.0, 1.0  # for each layer: enough for so few nodes
OTHERS, OTHERS_S = ("anneal", "greedy", "random"), 5.0


def problem_of(mesh: str, shared: Path) -> PlacementProblem:
    """Mixtral's layers on a small mesh of HD-MoE's dies and links; one batch of the reasoning trace is all."""
    x, y = mesh.split("x")
    small = (f"hardware.mesh_shape=[{x},{y}]", f"workload.batch_tokens={TOKENS}")
    problem = placement_problem(inputs_of(Case(MIXTRAL, "4x4", "5", "50"), shared, small, layers=LAYERS))
    return replace(problem, batches=problem.draw(1, SEED))


def optimum_rows(mesh: str, shared: Path) -> list[dict]:
    """The optimum of every layer, and what each optimiser and seed finds."""
    problem, rows = problem_of(mesh, shared), []
    layers = problem.trace.layer_ids.tolist()
    bound = lower_bound(problem, problem.batches)
    found = {("gradient", seed): tune(problem, TunerSettings(seed=seed)).gathered for seed in SEEDS}
    balances = [node_balance(problem, row, GAMMA, NODE_S) for row in range(len(layers))]
    for seed in SEEDS:
        settings = TwoStageSettings(GAMMA, NODE_S, LINK_S, seed=seed)
        found["milp-bayes", seed] = two_stage(problem, settings, balanced=balances).gathered
        for name in OTHERS:
            optimiser = OPTIMISERS[name]
            found[name, seed] = optimiser.run(problem, optimiser.settings(seed=seed, time_limit_s=OTHERS_S)).gathered
    times = {
        key: evaluate(problem.model, jnp.asarray(share, jnp.float32), problem.batches).total
        for key, share in found.items()
    }
    for row, layer in enumerate(layers):
        best = min(times, key=lambda key: float(times[key][row, 0]))
        proof = optimum(problem, row, found[best][row], PROOF_S)
        about = {"mesh": mesh, "layer": layer, "optimum_s": f"{proof.seconds:.6e}", "proven": proof.proven}
        about |= {"proven_bound_s": f"{proof.bound:.6e}", "quick_bound_s": f"{bound[row]:.6e}"}
        for (name, seed), seconds in times.items():
            taken = float(seconds[row, 0])
            gap = f"{taken / proof.seconds - 1:.6f}"
            rows.append(about | {"optimiser": name, "seed": seed, "seconds": f"{taken:.6e}", "gap": gap})
    return rows


JOBS = {f"optimum_{mesh}": lambda shared, mesh=mesh: optimum_rows(mesh, shared) for mesh in MESHES}
