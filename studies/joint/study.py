"""Machine, placement and gate tuned at once and in turn, judged on held-out text; see README.md.

`python studies/joint/study.py --shared FOLDER` writes `joint.csv`; with `--only cluster/0/1` those of a case
(name, gate loss, copies, seed) alone. FOLDER has the recorded traces in `traces/`.

A case takes about three minutes of one core; `--list` names all.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.config.hardware_space import HardwareSpace, SpaceFile
from jaxmoe.experiment.codesign.problem import HardwareProblem, hardware_problem
from jaxmoe.experiment.codesign.search import Candidate, tune_hardware
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.traces import read_trace, write_trace
from jaxmoe.traces.logits import reconstruct_logits
from jaxmoe.tune.machine.gate_table import gated, lost_by_layer

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "hd_moe" / "deepseek-v2-lite_4x4_5TFLOPs_50GBps.yaml"
jax.config.update("jax_default_matmul_precision", "highest")  # also in processes of `--jobs`

COLUMNS = ("case", "gate_loss", "copies", "seed", "design", "tuning_s", "unseen_s", "lost", "exchange", "machine")
DIE, LINK, UPLINK = (
    "hardware.die.compute_TFLOPs_per_s",
    "hardware.link.bandwidth_GB_per_s",
    "hardware.uplink.bandwidth_GB_per_s",
)
LAYER = 9
UNSEEN_BATCHES = 512  # that judge, of 4,074 tokens; with 32, two plans' times are off by 1 % by the draw alone
SET: dict[str, Any] = {
    "tuning.restarts": 8,
    "tuning.steps": 150,
    "tuning.batches_per_step": 4,
    "tuning.refine_steps": 200,
    "tuning.refine_chains": 1,
    "tuning.refine_batches": 16,
    "evaluation.batches": 128,
    "costs.exchange": "least_loaded",
    "costs.bytes_per_element": 2,
    "costs.weight_bytes_per_element": 2,
}


@dataclass(frozen=True)
class Case:
    """A machine whose numbers are to be found under a budget, and what may run on it."""

    variables: dict[str, tuple[float, float]]
    cost: str
    limit: float
    set: dict[str, Any]


RINGS = ["least_loaded", "reduce_scatter", "token_home", "ring_both_ways", "rings"]  # of routers that cannot add
# Six experts of each of the model's 26 layers: 64 of a layer on 16 dies leave half as much again for copies.
CAPACITY = 2.7
CLUSTER = {
    "kind": "clusters",
    "clusters": 4,
    "nodes_per_cluster": 4,
    "die": {"compute_TFLOPs_per_s": 5.0, "memory_bandwidth_GB_per_s": 1000.0, "memory_capacity_GB": CAPACITY},
    "link": {"bandwidth_GB_per_s": 100.0, "latency_ns": 100},
    "uplink": {"bandwidth_GB_per_s": 25.0, "latency_ns": 500},
    "router": {"switching": "cut_through", "chunk_B": 65536},
}
MESH_RATES = {DIE: (1.0, 50.0), LINK: (5.0, 500.0)}
MESH: dict[str, Any] = {"hardware.die.memory_capacity_GB": CAPACITY, "tuning.exchanges": RINGS}
ADDING = {"tuning.exchanges": [*RINGS, "corner_host_split_tree"]}  # where routers can add
CASES = {
    # Links and dies share the area of a mesh of 4x4 dies near memory.
    "mesh": Case(MESH_RATES, f"{DIE} + {LINK} / 10", 10, MESH | ADDING),
    # The same where links are four times as dear.
    "mesh_dear_links": Case(MESH_RATES, f"{DIE} + {LINK} / 2.5", 10, MESH),
    # Four nodes of four devices; a byte a second between nodes costs four times one inside.
    "cluster": Case(
        {DIE: (1.0, 50.0), LINK: (10.0, 1000.0), UPLINK: (2.0, 200.0)},
        f"{DIE} + {LINK} / 40 + {UPLINK} / 10",
        10,
        {"hardware": CLUSTER, "strategies.hybrid_regions": 4, "tuning.exchanges": RINGS},
    ),
}


def problem_of(case: Case, gate_loss: float | None, copies: bool, seed: int, trace: Path) -> HardwareProblem:
    space = HardwareSpace(
        name="joint",
        variables={key: {"from": low, "to": high, "scale": "log"} for key, (low, high) in case.variables.items()},
        derived={"cost": case.cost},
        constraints=(f"cost <= {case.limit}",),
        placement="tuned",
        gate_loss=gate_loss,
        copies=copies,
        starts=16,
        steps=150,
        seed=seed,
    )
    fixed = SET | case.set | {"workload.trace": {"kind": "file", "path": str(trace)}, "tuning.seed": seed}
    return hardware_problem(SpaceFile(HERE / "joint.yaml", space), SCENARIO, fixed, [LAYER])


def unseen(problem: HardwareProblem, candidate: Candidate, held: Path) -> tuple[float, float]:
    """Time of a design on its own best machine on held-out text, s, and the gate mass that it loses there."""
    own = {key: candidate.numbers[key] for key in problem.keys} | {"evaluation.batches": UNSEEN_BATCHES}
    inputs = inputs_of(problem.scenario_at(own), held, str(LAYER))
    strategy, table = candidate.design
    if table is None:
        return float(score(inputs, strategy, inputs.evaluation_batches).mean.mean()), 0.0
    table = jnp.asarray(table)
    lost = float(lost_by_layer(table, inputs.routed_batches).mean())
    return float(score(inputs, strategy, gated(table, inputs.routed_batches)).mean.mean()), lost


def rows_of(traces: tuple[Path, Path], name: str, gate_loss: float, copies: int, seed: int) -> Iterator[dict[str, str]]:
    """One row for each design; without a gate where `gate_loss` is 0, of whole experts with `copies`."""
    problem = problem_of(CASES[name], gate_loss or None, bool(copies), seed, traces[0])
    with StageTimer() as clock:
        result = tune_hardware(problem, lambda *_: None, clock)
    for each in result.candidates:
        seconds, lost = unseen(problem, each, traces[1])
        machine = " ".join(f"{each.numbers[key]:.4g}" for key in problem.keys)
        exchange = " ".join(each.design.strategy.placement.exchange)
        times = (f"{each.own:.6g}", f"{seconds:.6g}", f"{lost:.4g}")
        key = (name, gate_loss, copies, seed, each.name)
        yield dict(zip(COLUMNS, map(str, (*key, *times, exchange, machine)), strict=True))


def cases() -> list[tuple[str, float, int, int]]:
    """Case, gate mass that may be lost, whether experts are whole, and seed; a gate beside sharded experts alone."""
    made = [*product(CASES, (0,), (0, 1), (0, 1)), *product(CASES, (0.05,), (0,), (0, 1))]
    made += [("cluster", 0, 0, seed) for seed in (2, 3)]
    return sorted(made, key=lambda case: ([*CASES].index(case[0]), *case[1:]))


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "traces")
    given = parser.parse_args()
    recorded = read_trace(given.shared / "traces" / "deepseek-v2-lite" / "intent.npz").select_layers([LAYER])
    with tempfile.TemporaryDirectory() as folder:
        traces = (Path(folder) / "seen.npz", Path(folder) / "held.npz")
        for file, part in zip(traces, reconstruct_logits(recorded).trace.halves(), strict=True):
            write_trace(file, part)
        table = Table("joint", partial(rows_of, traces), cases(), COLUMNS[:4], COLUMNS)
        make_tables(HERE, [table], given, compiled=HERE / "runs" / "compiled")  # seeds compile many functions alike
