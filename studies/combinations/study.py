"""Systems of one paper and combinations of two, on unseen tokens of the same layer; see README.md.

    python studies/combinations/study.py
    python studies/combinations/study.py --only moentwine_6x6/0/

A row is written to `runs/` when it is known; the same command goes on, and writes the tables.

The first of its cases takes half a minute of one core, with compilation; `--list` names all.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from summary import numbers, summary

from jaxmoe.config import build_model, load_model, load_scenario_with
from jaxmoe.config.explain import ConfigSource
from jaxmoe.errors import InputError
from jaxmoe.experiment import standard_strategies
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.simulation import IterationBatches, batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import strategy
from jaxmoe.experiment.table import Table, folder_of_tables, make_tables, study_options
from jaxmoe.files import write_table
from jaxmoe.methods import AbstractRun, RolloutResult
from jaxmoe.methods.by_name import system_of
from jaxmoe.models import MoEModel
from jaxmoe.traces import write_trace
from jaxmoe.traces.synthesis import preset_process, sample_trace

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs"
CONFIGS = HERE.parents[1] / "configs"
TOKENS, STEPS, SEEDS = 32768, 2, (0, 1)
LAMBDAS = (0.2, 0.1)  # of every gate, alone and combined: that of the paper, and half of it
# Machine: tokens of a layer, dies of a group of attention, and layouts of tokens to choose from.
FLAT = ("baseline", "er")
MACHINES = {
    "moentwine_4x4": (4096, 4, FLAT),
    "moentwine_6x6": (4096, 4, FLAT),
    "nvl72": (4096, 4, FLAT[:1]),
    "nmp_4x8_10TFLOPs_25GBps": (512, 4, FLAT),
    "tsmc_sow_3x8": (4096, 4, FLAT),
    "dgx_b200_4x8": (4096, 4, FLAT[:1]),
    "moentwine_8x8": (4096, 4, FLAT),
    "dgx_b200_8x8": (4096, 4, FLAT[:1]),
    "moentwine_4x8x8": (4096, 4, (*FLAT, "her")),
}
MODEL = "deepseek-v3"
TREE = "token_home_tree"
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


@dataclass(frozen=True)
class Way:
    """A system with its settings, on a plan under an exchange, and the papers whose methods it has."""

    papers: tuple[str, ...]
    system: str
    plan: str = "ep_balanced"
    exchange: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        told = [f"{key}={value}" for key, value in self.settings.items() if key in ("layout", "balancer", "strategy")]
        strength = self.settings.get("gate", self.settings).get("lambda_cost")
        if "gate" in self.settings:
            told.append("gate")
        if strength == LAMBDAS[1]:
            told.append(f"lambda={strength}")
        parts = (self.system, self.plan, self.exchange, *told)
        return " ".join(part for part in parts if part)


def gate(strength: float) -> dict[str, Any]:
    return {"gate": {"lambda_cost": strength}}


def ways(tp: int, layouts: tuple[str, ...]) -> Iterator[Way]:
    """Every paper's system with the settings to choose from, then combinations of two."""
    for plan in ("tp_both_ways", "hybrid_complete"):
        yield Way(("hd_moe",), "static", plan)
    for plan in ("hybrid", "ep_balanced"):
        yield Way(("hd_moe",), "static", plan, TREE)
        yield Way(("hd_moe",), "hd_moe", plan, TREE)
    yield Way(("hd_moe",), "static", "ep_balanced", "token_home")
    for strength in LAMBDAS:
        own = {"lambda_cost": strength, "copies": "node", "time_model": "congestion"}
        yield Way(("camoe",), "camoe", "ep_balanced", None, own)
        for exchange in ("token_home", TREE):
            yield Way(("camoe",), "static", "ep_balanced", exchange, gate(strength))
        yield Way(("camoe", "hd_moe"), "static", "hybrid", TREE, gate(strength))
    for plan in ("hybrid", "ep_balanced"):
        yield Way(("camoe", "hd_moe"), "hd_moe", plan, TREE, gate(LAMBDAS[0]))
    for layout in layouts:
        settings = {"layout": layout, "tp": tp, "balancer": "none"}  # which has no effect in so few iterations
        yield Way(("moentwine",), "moentwine", "ep_balanced", None, settings)
        for strength in LAMBDAS:
            yield Way(("camoe", "moentwine"), "moentwine", "ep_balanced", None, settings | gate(strength))
    yield Way(("wafer_gpu",), "wafer_gpu")
    yield Way(("expert_streaming",), "expert_streaming", "ep_balanced", None, {"strategy": "fse_paired"})


class Case:
    """A machine with a trace: what came before is known, what comes after is judged."""

    def __init__(self, machine: str, seed: int) -> None:
        self.machine, self.seed = machine, seed
        tokens, self.tp, self.layouts = MACHINES[machine]
        values = {
            "hardware": machine,
            "model": MODEL,
            "workload.batch_tokens": tokens,
            "workload.context_tokens": 4096,
            "workload.trace": {"kind": "synthetic", "tokens": TOKENS},  # replaced by the file
            "costs.bytes_per_element": 2,
            "costs.weight_bytes_per_element": 1,
            "strategies.hybrid_regions": self.tp,
        }
        scenario = load_scenario_with(CONFIGS / "scenarios" / "quickstart.yaml", values, ConfigSource("study.py", HERE))
        layer = str(middle_layer(build_model(scenario.model)))
        self.inputs = inputs_of(scenario, trace_of(MODEL, seed), layers=layer)
        self.iterations = iterations_of(self.inputs, STEPS)

    def iterations_for(self, way: Way) -> tuple[Inputs, IterationBatches]:
        if way.system != "wafer_gpu":
            return self.inputs, self.iterations
        section = type("Kept", (), {"keeps_requests": True})
        scenario = self.inputs.scenario.model_copy(update={"system": section})
        return self.inputs, iterations_of(replace(self.inputs, scenario=scenario), STEPS)

    def run(self, way: Way) -> tuple[AbstractRun, RolloutResult, IterationBatches]:
        inputs, iterations = self.iterations_for(way)
        known = replace(inputs, trace=iterations.history)
        placed = {each.name: each for each in standard_strategies(known)}[way.plan]
        if way.exchange is not None:
            placed = strategy(known, way.plan, placed.placement.share, way.exchange)
        made = system_of(way.system, **way.settings).runs(setting_of(inputs, placed, iterations.history))
        *_, run = made.values()
        return run, run.rollout(iterations.batches), iterations


def middle_layer(moe: MoEModel) -> int:
    return moe.moe_layer_ids[len(moe.moe_layer_ids) // 2]


def trace_of(model: str, seed: int) -> Path:
    """A file with one layer of a trace, drawn in a process of its own that compiles for speed."""
    path = RUNS / f"trace_{model}_{seed}.npz"
    if not path.exists():
        RUNS.mkdir(exist_ok=True)
        command = [sys.executable, __file__, "--draw", model, str(seed), str(path)]
        subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": ""})
    return path


def draw(model: str, seed: int, path: Path) -> None:
    layer = (middle_layer(build_model(load_model(model, "study.py"))),)
    write_trace(path, sample_trace(preset_process(model).up_to(layer), TOKENS, seed, logits=1.0).select_layers(layer))


# What is counted: dispatch, compute and combine of the experts, and the all-reduce that brings their tokens together.
# Systems that say nothing about attention have the all-reduce of groups of neighbours, moentwine's baseline.


def row_of(machine: str, seed: int, papers: str, label: str) -> list[dict[str, Any]]:
    """The row of a case and a system, in µs; with the reason where it cannot be."""
    case, baseline_us = case_of(machine, seed)
    way = next(way for way in ways(case.tp, case.layouts) if ("+".join(way.papers), way.label) == (papers, label))
    row: dict[str, Any] = {"machine": machine, "seed": seed, "papers": papers, "way": label}
    try:
        run, rolled, iterations = case.run(way)
        replayed = 0.0 if way.system == "expert_streaming" else run.replay(rolled, batch_at(iterations, 0, 0), 0, 0)
    except InputError as error:
        return [row | {"reason": str(error).partition("\n")[0]}]
    stages = {name: 1e6 * float(np.mean(seconds)) for name, seconds in rolled.time.stages.items()}
    attention = stages.pop("attention", 0.0)
    first = 1e6 * float(rolled.time.stages["attention"][0, 0]) if attention else 0.0
    added = 0.0 if "all_reduce" in stages else baseline_us
    row |= {"total_us": 1e6 * float(np.mean(rolled.time.total)) - attention + added, "attention_us": attention}
    row |= {f"{name}_us": value for name, value in stages.items()} | ({"all_reduce_us": added} if added else {})
    row |= {name: rolled.figures[name] for name in ("retained_gate_mass", "changed_choices") if name in rolled.figures}
    if replayed:
        row["model_of_replayed_us"] = 1e6 * float(rolled.compared[0, 0]) - first + added
        row["simulated_us"] = 1e6 * replayed - first + added
    return [row]


def baseline_of(case: Case) -> float:
    """The all-reduce of groups of neighbours, µs; 0 where the machine has no such groups."""
    settings = {"layout": "baseline", "tp": case.tp, "balancer": "none"}
    try:
        _, rolled, _ = case.run(Way(("moentwine",), "moentwine", "ep_balanced", None, settings))
    except InputError:
        return 0.0
    return 1e6 * float(np.mean(rolled.time.stages["all_reduce"]))


@cache
def case_of(machine: str, seed: int) -> tuple[Case, float]:
    """The case, and its all-reduce of groups of neighbours, µs. What another kind of machine compiled is let go."""
    jax.clear_caches()
    case = Case(machine, seed)
    return case, baseline_of(case)


KEY = ("machine", "seed", "papers", "way")
CASES = [
    (machine, seed, "+".join(way.papers), way.label)
    for machine, seed in product(MACHINES, SEEDS)
    for way in ways(*MACHINES[machine][1:])
]


def main() -> None:
    given = study_options(__doc__, resume=True).parse_args()
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", QUICK)
    of_rows = argparse.Namespace(**vars(given) | {"out": RUNS / "quick" if given.quick else RUNS})  # with all digits
    made = make_tables(HERE, [Table("rows", row_of, CASES, KEY)], of_rows)
    rows, to = [numbers(row) for row in made.get("rows", [])], folder_of_tables(HERE, given)
    if given.list or not rows:
        return
    write_table(to / "ways.csv", rows, digits=5)
    wanted, there = (Counter(map(itemgetter(0, 1), each)) for each in (CASES, map(itemgetter(*KEY), rows)))
    whole = [row for row in rows if wanted[case := (row["machine"], row["seed"])] == there[case]]
    write_table(to / "summary.csv", summary(whole), digits=5)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        draw(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
