"""Tuned over the best shipped strategy on every mesh and wafer machine that ships with dies, for four models.

The shipped strategy, too, is chosen on the tuner's own batches, before those that judge are seen. Elements and weights
have two bytes, an expert's FFN 6 h i FLOPs. Where no trace is at hand one is drawn from the preset of the model.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import numpy as np
from cases import DEEPSEEK, GIVEN_EXCHANGES, MIXTRAL, ROOT, RUNS, Run
from scoring import SEED, Plan, Timed, timed

from jaxmoe.engine import Layer, LayerTime
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs, read_inputs
from jaxmoe.placement.strategies import shipped_strategies
from jaxmoe.traces import write_trace
from jaxmoe.traces.synthesis import sample_trace
from jaxmoe.traces.synthesis.presets import PRESETS
from jaxmoe.tune import PlacementProblem, TuneResult, tune
from jaxmoe.tune.bounds import lower_bound

POWERS = ("", "_10TFLOPs_25GBps", "_2.5TFLOPs_75GBps")
MACHINES = (*(f"nmp_{mesh}{power}" for mesh in ("4x4", "4x8", "8x8") for power in POWERS), "moentwine_4x8x8")
# The wafers as they were first read: 8 TB/s each way of a link, 9 across a border. The shipped file has eighths since.
WAFERS = ("link.bandwidth_GB_per_s=8000", "border.bandwidth_GB_per_s=9000", "router.chunk_B=65536")
LAYERS = {MIXTRAL: 16, DEEPSEEK: 13, "deepseek-v3": 6, "qwen3-235b-a22b": 3}
DRAWN_LAYERS, DRAWN_TOKENS = 4, 12288  # of presets: the first layers, of which the last is used
BATCHES = {128: 64, 1024: 16, 8192: 8}
COSTS = ("costs.ffn_flops=6hi", "costs.bytes_per_element=2", "costs.weight_bytes_per_element=2")
COLUMNS = (
    "job",
    "machine",
    "model",
    "layer",
    "trace",
    "batch_tokens",
    "shipped",
    "shipped_exchange",
    "shipped_us",
    "tuned_exchange",
    "tuned_us",
    "shipped_over_tuned",
    "bound_us",
    "tuned_over_bound",
    "limit",
    "wall_s",
)


def trace_of(model: str, run: Run) -> Path:
    """A recorded trace, or one drawn from the model's preset and kept in `runs/`."""
    if model not in PRESETS:
        return run.trace(model)
    path = RUNS / f"{model}.npz"
    if not path.is_file():
        aside = RUNS / f"{model}.{os.getpid()}.npz"
        write_trace(aside, sample_trace(PRESETS[model].process(layers=DRAWN_LAYERS), DRAWN_TOKENS, SEED))
        aside.replace(path)
    return path


def inputs_of(machine: str, model: str, tokens: int, run: Run, overrides: Iterable[str] = ()) -> Inputs:
    """One layer of a model on a machine, or on one that differs by `overrides`."""
    trace = trace_of(model, run)
    chosen = [f"hardware={machine}", f"model={model}", "costs.exchange=least_loaded", *COSTS]
    chosen += [f"workload.batch_tokens={tokens}", f"workload.trace={{kind: file, path: {trace}}}"]
    chosen += [f"hardware.{value}" for value in WAFERS if machine == "moentwine_4x8x8"]
    base = ROOT / "configs" / "scenarios" / "quickstart.yaml"
    return read_inputs(base, [*chosen, *run.overrides(BATCHES[tokens]), *overrides], trace, str(LAYERS[model]))


def best_shipped(problem: PlacementProblem, result: TuneResult) -> Plan:
    """The strategy that ships with jaxmoe and is fastest on the batches that have the tuner's last word."""
    found = result.shipped
    if found is None:
        raise ValueError("no shipped strategy fits the memory; raise the machine's memory capacity")
    topology = problem.model.machine.topology
    usual = shipped_strategies(problem.frequency, topology, tuple(problem.gathers), SEED)
    (name, *_) = (each.name for each in usual if np.allclose(each.share[0], found.plan[0], atol=1e-6))
    return Plan(name, found.plan[0], (str(found.exchange[0]),))


def limit(inputs: Inputs, best: Timed) -> str:
    """What the tuned plan waits for longest: nodes that compute, their memory, or links."""
    if best.time.communication.mean() > best.time.compute.mean():
        return "link"
    return "memory" if _compute_without_memory(inputs, best) < 0.999 * best.time.compute.mean() else "compute"


def _compute_without_memory(inputs: Inputs, best: Timed) -> float:
    """Seconds of compute if memory were as fast as could be."""
    free: Layer = eqx.tree_at(lambda model: model.machine.memory, inputs.model, ())
    seen: LayerTime = timed(replace(inputs, model=free), best.plan, best.exchange, inputs.evaluation_batches).time
    return float(seen.compute.mean())


def rows(machine: str, model: str, tokens: int, run: Run) -> list[dict]:
    """The one row of a machine, model and batch size."""
    inputs = inputs_of(machine, model, tokens, run)
    problem = replace(placement_problem(inputs), exchanges=GIVEN_EXCHANGES)
    begun = time.perf_counter()
    result = tune(problem, run.settings)
    wall = time.perf_counter() - begun
    shipped = best_shipped(problem, result)
    plans = (shipped, Plan("tuned", result.share[0], result.exchange))
    base, tuned = (timed(inputs, plan, plan.exchanges[0], inputs.evaluation_batches) for plan in plans)
    bound = float(lower_bound(problem, inputs.evaluation_batches)[0])
    row = {"machine": machine, "model": model, "layer": LAYERS[model], "batch_tokens": tokens}
    row |= {"trace": "preset" if model in PRESETS else "recorded"}
    row |= {"shipped": shipped.name, "shipped_exchange": base.exchange, "shipped_us": f"{1e6 * base.seconds:.4f}"}
    row |= {"tuned_exchange": tuned.exchange, "tuned_us": f"{1e6 * tuned.seconds:.4f}"}
    row |= {"shipped_over_tuned": f"{base.seconds / tuned.seconds:.5f}", "bound_us": f"{1e6 * bound:.4f}"}
    row |= {"tuned_over_bound": f"{tuned.seconds / bound:.4f}"}
    return [row | {"limit": limit(inputs, tuned), "wall_s": f"{wall:.1f}"}]


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every machine, model and batch size."""
    return {
        f"machines_{machine}_{model}_{tokens}": lambda at=(machine, model, tokens): rows(*at, run)
        for machine in MACHINES
        for model in LAYERS
        for tokens in BATCHES
    }
