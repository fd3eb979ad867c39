"""Whole steps of models as they are deployed, model against simulator, on machines of every kind; see README.md.

`whole_steps.csv` has a step that decodes and one that reads prompts, at the requests in flight of a case and a quarter
of them, with and without drafted tokens: seconds told, and of the event simulator. `whole_steps_agreement.csv` has R2
and errors by what shares a machine. Ten minutes of a core.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from study import HERE

from jaxmoe.config import load_scenario
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.experiment.machine_replay import replayed_step
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.experiment.validation import agreement
from jaxmoe.serving.closed_loop import step_loads
from jaxmoe.serving.step import StepLoad

SCENARIOS = HERE.parents[1] / "configs" / "scenarios"
DRAFTS = "deployment.speculative={tokens: 2, acceptance: 0.7}"
PARTS = (1.0, 0.25)  # of the requests in flight


@dataclass(frozen=True)
class Case:
    """A deployment on a machine; what runs at a time there is `serial`, or shares processors, memory or links."""

    scenario: str
    given: tuple[str, ...] = ()
    serial: bool = True


def requests(count: int, prompt: int = 256, output: int = 256) -> str:
    """A deployment on a machine without measured kernels."""
    return f"deployment={{backend: sglang, concurrency: {count}, prompt_tokens: {prompt}, output_tokens: {output}}}"


SMALL = ("workload.trace={kind: synthetic, tokens: 1024}", "workload.batch_tokens=64", "evaluation.iterations=2")
LOGITS = "workload.trace={kind: preset, preset: qwen3-30b-a3b, tokens: 1024, logits: 1.31}"  # a biased gate needs them
WIDE = ("deployment.tensor=1", "deployment.data=8", "deployment.expert_ranks=8")
H200, B200 = "deployed/deepseek-v3_h200_8", "deployed/minimax-m2.5_b200_8"


def engine(scenario: str, count: int, layers: tuple[int, int], *more: str, serial: bool = True) -> Case:
    """A case whose two layers stand for all."""
    return Case(scenario, (*SMALL, requests(count), f"evaluation.layers={[*layers]}", *more), serial)


CASES = {
    "mesh, hd_moe's plan": engine("hd_moe/mixtral-8x7b_4x8_5TFLOPs_50GBps", 64, (0, 16)),
    "mesh, hd_moe's broadcasts": engine("hd_moe/dynamic_mixtral-8x7b_4x8", 64, (0, 16)),
    "wafer, entwined rings": engine("moentwine/deepseek-v3_6x6", 256, (3, 41)),
    "wafers, entwined rings": engine("moentwine/deepseek-v3_4x8x8", 256, (3, 41)),
    "wafer of GPUs, fetched experts": engine("wafer_gpu/deepseek-v2-lite_dojo_5x5", 64, (1, 14), serial=False),
    "GPU clusters, biased gate": engine("camoe/qwen3-30b-a3b_4nodes", 64, (0, 24), LOGITS),
    "chiplets, streamed experts": engine("expert_streaming/qwen3-30b-a3b_2x2", 64, (0, 24), serial=False),
    "8 H200, in turn": Case(H200),
    "8 B200, experts apart": Case(B200, WIDE),
    "8 H200, two batches": Case(H200, (*WIDE, "deployment.overlap=two_batches"), serial=False),
    "8 H200, shared experts beside": Case(H200, (*WIDE, "deployment.overlap=shared_beside_dispatch"), serial=False),
}


@cache
def steps(name: str) -> tuple[dict[str, object], ...]:
    """Rows of a case."""
    case, found = CASES[name], list[dict[str, object]]()
    for drafts in ((), (DRAFTS,)):
        scenario = load_scenario(SCENARIOS / f"{case.scenario}.yaml", (*case.given, *drafts))
        own = next(compared(scenario))
        sized = {step for part in PARTS for step in _steps_of(own, part)}
        for phase, load in sorted(sized):
            told, simulated = float(own.step.seconds(load)), replayed_step(scenario, own.step, load)
            known = {"case": name, "scenario": case.scenario, "phase": phase, "drafts": own.deployment.drafted}
            sizes = {"decoding": load.decoding, "read": load.prefilled, "serial": case.serial}
            found.append(known | sizes | {"told_s": told, "simulated_s": simulated, "error": told / simulated - 1})
    return tuple(found)


def _steps_of(own: Deployed, part: float) -> Iterator[tuple[str, StepLoad]]:
    """Steps of a part of the requests in flight, by their phase."""
    users = own.users._replace(concurrency=max(own.users.concurrency * part, own.deployment.data))
    loads = step_loads(own.step, users, own.memory.sequences, own.backend)
    for phase, load in (("decode", loads.alone), ("read prompts", loads.reading)):
        yield phase, load._make(map(float, load))


def rows(name: str) -> Iterator[dict[str, object]]:
    """Steps of a case, told and simulated."""
    yield from steps(name)


def agreements() -> Iterator[dict[str, object]]:
    """R2 of seconds and of their logarithms, for these range over factors, and errors."""
    every = [row for name in CASES for row in steps(name)]
    for kind, some in {
        "all": every,
        "serial": [row for row in every if row["serial"]],
        "shared": [row for row in every if not row["serial"]],
    }.items():
        told, simulated = (np.array([float(str(row[key])) for row in some]) for key in ("told_s", "simulated_s"))
        figures = agreement(told, simulated)
        yield {"steps": kind} | figures | {"r2_of_logarithms": agreement(np.log(told), np.log(simulated))["r2"]}


if __name__ == "__main__":
    tables = [
        Table("whole_steps", rows, [(name,) for name in CASES], ("case",), digits=6),
        Table("whole_steps_agreement", agreements, digits=6),
    ]
    for found in make_tables(HERE, tables, study_options(__doc__).parse_args()).values():
        print(*found, sep="\n")
