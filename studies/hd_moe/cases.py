"""The configurations of hd_moe V-B and the inputs they are run with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxmoe.experiment.inputs import Inputs, read_inputs
from jaxmoe.traces import read_trace, write_trace
from jaxmoe.traces.synthesis import fit_process, sample_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = HERE / "runs"
MIXTRAL, DEEPSEEK, QWEN = "mixtral-8x7b", "deepseek-v2-lite", "qwen2-57b-a14b"
TRACES = {MIXTRAL: "reasoning", DEEPSEEK: "summary"}  # what plans are tuned on
LAYERS = {MIXTRAL: "16", DEEPSEEK: "13", QWEN: "13"}  # in the middle of the model
BATCH_SIZES = (16, 32, 64, 128, 256, 512)
QWEN_TOKENS, SEED = 8192, 0
# hd_moe's own setting: results gather at the scenario's `costs.exchange`, its lowest host, or go round one ring.
ONE_EXCHANGE = ("tuning.exchanges=[ring_both_ways]",)


@dataclass(frozen=True)
class Case:
    """A model on one of the paper's machines."""

    model: str
    mesh: str
    tflops: str
    gbps: str

    @property
    def name(self) -> str:
        return f"{self.model}_{self.mesh}_{self.tflops}TFLOPs_{self.gbps}GBps"

    @property
    def columns(self) -> dict[str, str]:
        """How tables name it."""
        return {"model": self.model, "mesh": self.mesh, "TFLOPs_per_s": self.tflops, "GB_per_s": self.gbps}

    @property
    def published_plan(self) -> str:
        """File name of the placement published for it, if any."""
        return f"{self.model}_{float(self.tflops)}tflops_{float(self.gbps)}gbps_{self.mesh}.npz"


MACHINES = (("4x8", "5", "50"), ("4x8", "2.5", "75"), ("4x8", "10", "25"), ("4x4", "5", "50"), ("8x8", "5", "50"))
CASES = tuple(Case(model, *machine) for model in (MIXTRAL, DEEPSEEK, QWEN) for machine in MACHINES)


def trace_file(model: str, shared: Path) -> Path:
    """The trace that plans of a model are tuned on. Qwen2's is drawn from a generator and kept beside the runs."""
    if model != QWEN:
        return shared / "traces" / model / f"{TRACES[model]}.npz"
    path = RUNS / "qwen_like.npz"
    if not path.is_file():
        RUNS.mkdir(exist_ok=True)
        write_trace(path, qwen_like(shared))
    return path


def qwen_like(shared: Path):
    """A trace of Qwen2-57B's shape from a process fitted to DeepSeek-V2-Lite, which has as many experts.

    No trace of Qwen2 is at hand. Its tokens choose 8 experts, so the fitted process is told to draw 8.
    """
    fitted = fit_process(read_trace(trace_file(DEEPSEEK, shared)), SEED)
    facts = fitted.facts | {"model": "synthetic, of the shape of Qwen2-57B-A14B, like DeepSeek-V2-Lite"}
    return sample_trace(replace(fitted, top_k=8, facts=facts), QWEN_TOKENS, SEED)


def inputs_of(
    case: Case, shared: Path, overrides: Iterable[str] = (), trace: Path | None = None, layers: str | None = None
) -> Inputs:
    """What the commands of `jaxmoe` would read for a case, in hd_moe's own setting."""
    scenario = ROOT / "configs" / "scenarios" / "hd_moe" / f"{case.name}.yaml"
    chosen = LAYERS[case.model] if layers is None else layers
    recorded = trace_file(case.model, shared) if trace is None else trace
    return read_inputs(scenario, [*ONE_EXCHANGE, *overrides], recorded, chosen)


def seconds(rows: Sequence[dict], **where: str) -> float:
    """`total_s` of the one row that has these values."""
    (row,) = (row for row in rows if all(str(row[key]) == str(value) for key, value in where.items()))
    return float(row["total_s"])
