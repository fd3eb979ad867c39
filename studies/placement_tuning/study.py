"""Tune placements of Mixtral and DeepSeek-V2-Lite on HD-MoE's machine and judge them; see README.md.

Runs the commands of `jaxmoe` that a user would run, each into a folder of its own under `runs/`, then gathers
the tables beside this file. A run whose summary is there already is not repeated: delete its folder to redo it.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import given_plans

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCENARIOS = ROOT / "configs" / "scenarios" / "hd_moe"
TIMES = ("compute_s", "dispatch_s", "combine_s", "total_s", "p95_total_s", "des_total_s", "des_model_total_s")
BATCH_TOKENS = "32,128,512"


@dataclass(frozen=True)
class Case:
    """One machine and model: the trace to tune on, other traces to judge on, and the published placement."""

    name: str
    scenario: str
    traces: str  # folder of traces
    tuned_on: str
    others: tuple[str, ...]
    published: str


MIXTRAL_TOPICS = ("coding", "math", "writing", "extraction", "humanities")
CASES = (
    Case(
        "mixtral_4x8",
        "mixtral-8x7b_4x8_5TFLOPs_50GBps.yaml",
        "mixtral-8x7b",
        "reasoning",
        MIXTRAL_TOPICS,
        "mixtral-8x7b_5.0tflops_50.0gbps_4x8.npz",
    ),
    Case(
        "mixtral_4x4",
        "mixtral-8x7b_4x4_5TFLOPs_50GBps.yaml",
        "mixtral-8x7b",
        "reasoning",
        MIXTRAL_TOPICS,
        "mixtral-8x7b_5.0tflops_50.0gbps_4x4.npz",
    ),
    Case(
        "deepseek_4x8",
        "deepseek-v2-lite_4x8_5TFLOPs_50GBps.yaml",
        "deepseek-v2-lite",
        "summary",
        ("intent", "translation"),
        "deepseek-v2-lite_5.0tflops_50.0gbps_4x8.npz",
    ),
)


class Runs:
    """Runs commands once each and reads what they wrote."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared

    def summary(self, verb: str, case: Case, trace: str, folder: str, *options: str) -> dict:
        """The summary of one command, run now unless it is there."""
        out = HERE / "runs" / folder
        if not (out / "summary.json").is_file():
            recorded = self.shared / "traces" / case.traces / f"{trace}.npz"
            command = [sys.executable, "-m", "jaxmoe", verb, str(SCENARIOS / case.scenario), "--trace", str(recorded)]
            print("+", " ".join(["jaxmoe", *command[3:], *options, "--out", str(out)]), flush=True)
            subprocess.run([*command, *options, "--out", str(out)], check=True)
        return json.loads((out / "summary.json").read_text())

    def tuned(self, case: Case) -> dict:
        published = self.shared / "reference" / "hd_moe" / case.published
        return self.summary("tune", case, case.tuned_on, case.name, "--plan", f"published={published}")

    def plans(self, case: Case) -> dict[str, Path]:
        """The published plan and what tuning wrote: the tuned plan, and what gathers everywhere if that is another."""
        run = HERE / "runs" / case.name
        files = {"tuned_gathered": run / "plan_gathered.npz", "tuned": run / "plan.npz"}
        published = {"published": self.shared / "reference" / "hd_moe" / case.published}
        return published | {name: path for name, path in files.items() if path.is_file()}

    def given(self, case: Case) -> list[str]:
        return [word for name, path in self.plans(case).items() for word in ("--plan", f"{name}={path}")]

    def judged(self, case: Case, trace: str) -> dict:
        # The simulator is asked in `validated`; here one batch is enough.
        fewer = ("--set", "validation.batches=1")
        return self.summary("evaluate", case, trace, f"{case.name}_{trace}", *self.given(case), *fewer)

    def validated(self, case: Case) -> dict:
        sizes = ("--standard", "--batch-tokens", BATCH_TOKENS, "--set", "validation.batches=1")
        return self.summary("validate", case, case.tuned_on, f"{case.name}_validation", *self.given(case), *sizes)


def layer_rows(case: Case, trace: str, summary: dict) -> Iterator[dict]:
    """Every layer and strategy of one summary."""
    for strategy, entry in summary["strategies"].items():
        for layer in entry["layers"]:
            times = {name: f"{layer[name]:.6e}" for name in TIMES}
            yield {"case": case.name, "trace": trace, "strategy": strategy, "layer": layer["layer_id"]} | times


def agreement_rows(case: Case, summary: dict) -> Iterator[dict]:
    """Every strategy, batch size, layer and batch that model and simulator both timed."""
    for strategy, entry in summary["strategies"].items():
        for tokens, trial in entry["batch_tokens"].items():
            for layer in trial["layers"]:
                for batch in layer["batches"]:
                    model, simulated = (batch[side] for side in ("model", "simulated"))
                    yield {
                        "case": case.name,
                        "strategy": strategy,
                        "tokens": tokens,
                        "layer": layer["layer_id"],
                        "model_s": f"{model['dispatch_s'] + model['combine_s']:.6e}",
                        "simulated_s": f"{simulated['dispatch_s'] + simulated['combine_s']:.6e}",
                    }


def load_rows(case: Case, summary: dict, runs: Runs) -> Iterator[dict]:
    """How busy nodes and links are in the layer where tuning gained most over the published plan."""
    layer = summary["layer_ids"][int(np.argmax(ratio(summary, "published")))]
    recorded = runs.shared / "traces" / case.traces / f"{case.tuned_on}.npz"
    inputs = read_inputs(SCENARIOS / case.scenario, None, recorded, str(layer))
    for plan in given_plans([f"{name}={path}" for name, path in runs.plans(case).items()], inputs, taken=()):
        busy = score(inputs, plan, inputs.evaluation_batches)
        loads = {"node": busy.node_time[0], "link": busy.link_time[0]}
        for kind, times in loads.items():
            for index, seconds in enumerate(np.asarray(times)):
                where = {"case": case.name, "layer": layer, "strategy": plan.name, "kind": kind, "index": index}
                yield where | {"seconds": f"{seconds:.6e}"}


def ratio(summary: dict, strategy: str, plan: str = "tuned") -> np.ndarray:
    """Time of a strategy over that of a tuned plan, by layer."""
    totals = {
        name: np.array([layer["total_s"] for layer in summary["strategies"][name]["layers"]])
        for name in (strategy, plan)
    }
    return totals[strategy] / totals[plan]


def claims(case: Case, trace: str, summary: dict) -> Iterator[dict]:
    """Speed-up of the tuned plan, and of the tuned plan that gathers everywhere, over every other strategy."""
    plans = [plan for plan in ("tuned", "tuned_gathered") if plan in summary["strategies"]]
    for plan in plans:
        for strategy in (name for name in summary["strategies"] if name not in plans):
            gains = ratio(summary, strategy, plan)
            yield {
                "case": case.name,
                "trace": trace,
                "plan": plan,
                "over": strategy,
                "mean": f"{gains.mean():.3f}",
                "least": f"{gains.min():.3f}",
                "layers_below_1": int((gains < 1).sum()),
                "layers": len(gains),
            }


def write_table(name: str, rows: Iterable[dict]) -> None:
    """Write a CSV beside this file, aside first."""
    rows = list(rows)
    aside = HERE / f"{name}.csv.part"
    with aside.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    aside.replace(HERE / f"{name}.csv")


def main() -> None:
    """Run what is missing, then write all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of traces/ and reference/")
    shared = parser.parse_args().shared.resolve()
    if not (shared / "traces").is_dir():
        sys.exit(f"{shared}: no traces/ there; give the folder of the real traces with --shared")
    runs = Runs(shared)
    tuned = [(case, runs.tuned(case)) for case in CASES]
    judged = [(case, case.tuned_on, summary) for case, summary in tuned]
    judged += [(case, trace, runs.judged(case, trace)) for case in CASES for trace in case.others]
    validated = [(case, runs.validated(case)) for case in CASES]
    write_table("layers", (row for given in judged for row in layer_rows(*given)))
    write_table("speedups", (row for given in judged for row in claims(*given)))
    write_table("agreement", (row for given in validated for row in agreement_rows(*given)))
    write_table("loads", (row for given in tuned for row in load_rows(*given, runs)))
    write_table("tuning", (row for given in tuned for row in tuning_rows(*given)))
    report()


def tuning_rows(case: Case, summary: dict) -> Iterator[dict]:
    """What each step of the tuner reached, mean over layers, and how long it took."""
    stages = {name: values["mean"] for name, values in summary["tuning"]["stages"].items()}
    for stage, seconds in (stages | {"bound_s": summary["bound_s"]["mean"]}).items():
        yield {"case": case.name, "what": stage, "mean_s": f"{seconds:.6e}"}
    for stage, wall in summary["wall_s"]["stages"].items():
        yield {"case": case.name, "what": f"wall {stage}", "mean_s": f"{wall['run_s'] + wall['compile_s']:.1f}"}


def report() -> None:
    """Print the tables that README.md quotes."""
    for name in ("speedups", "tuning"):
        print(f"\n{name}.csv\n" + (HERE / f"{name}.csv").read_text())
    with (HERE / "agreement.csv").open() as file:
        rows = list(csv.DictReader(file))
    model, simulated = (np.array([float(row[key]) for row in rows]) for key in ("model_s", "simulated_s"))
    r2 = 1 - ((model - simulated) ** 2).sum() / ((simulated - simulated.mean()) ** 2).sum()
    error = 100 * np.abs(model / simulated - 1)
    figures = f"R2 {r2:.6f}, mean absolute error {error.mean():.2f} %, largest {error.max():.2f} %"
    print(f"model against simulation: {len(rows)} points, {figures}")


if __name__ == "__main__":
    main()
