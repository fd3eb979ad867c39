"""The cases of the main table, and the inputs of every job."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmoe.experiment.inputs import Inputs, read_inputs
from jaxmoe.placement import read_plan
from jaxmoe.tune import TunerSettings
from jaxmoe.tune.settings import DEFAULT_EXCHANGES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = HERE / "runs"
SCENARIOS = ROOT / "configs" / "scenarios" / "hd_moe"
MIXTRAL, DEEPSEEK = "mixtral-8x7b", "deepseek-v2-lite"
TRACES = {MIXTRAL: "reasoning", DEEPSEEK: "summary"}
MOE_LAYERS = {MIXTRAL: range(32), DEEPSEEK: range(1, 27)}
HOP_LATENCY_NS = 200
# The tuner's default exchanges but the one that chooses by congestion: of all tables but `gains` and `variations`.
GIVEN_EXCHANGES = tuple(name for name in DEFAULT_EXCHANGES if name != "least_congested")


@dataclass(frozen=True)
class Run:
    """How a study is run: where traces and plans are, every how many layers, and whether it is but a trial."""

    shared: Path
    layers_step: int = 8
    quick: bool = False
    out: Path | None = None

    @property
    def settings(self) -> TunerSettings:
        """The tuner's own settings; few steps in a trial."""
        if self.quick:
            return TunerSettings(restarts=2, steps=20, refine_steps=20, refine_chains=1, hybrid_cuts=1)
        return TunerSettings()

    def overrides(self, batches: int) -> list[str]:
        """So many unseen batches that judge; few in a trial."""
        judged = 4 if self.quick else batches
        return [f"evaluation.batches={judged}", "validation.batches=1"]

    def table(self, name: str) -> Path:
        """Where an earlier table is: among those of this run, or else the committed one."""
        own = (self.out or RUNS / ("quick" if self.quick else "tables")) / f"{name}.csv"
        return own if own.is_file() else HERE / own.name

    def trace(self, model: str) -> Path:
        """The recorded trace that plans of a model are tuned and judged on, on different batches."""
        return self.shared / "traces" / model / f"{TRACES[model]}.npz"


@dataclass(frozen=True)
class Case:
    """A model on one of hd_moe's machines, with a hop latency, and the published plan for its mesh, if any."""

    model: str
    mesh: str
    tflops: str
    gbps: str
    published: str | None = None  # machine of the published plan: TFLOP/s and GB/s
    latency_ns: int = 0

    @property
    def name(self) -> str:
        hop = f"_{self.latency_ns}ns" if self.latency_ns else ""
        return f"{self.model}_{self.mesh}_{self.tflops}TFLOPs_{self.gbps}GBps{hop}"

    def layers(self, step: int) -> list[int]:
        return list(MOE_LAYERS[self.model])[::step]

    def inputs(self, run: Run, layer: int, batches: int = 64, overrides: Iterable[str] = ()) -> Inputs:
        """One layer of the case, as the commands of `jaxmoe` would read it."""
        scenario = SCENARIOS / f"{self.model}_{self.mesh}_{self.tflops}TFLOPs_{self.gbps}GBps.yaml"
        latency = f"hardware.link.latency_ns={self.latency_ns}"
        given = [*run.overrides(batches), latency, *overrides]
        return read_inputs(scenario, given, run.trace(self.model), str(layer))

    def published_share(self, run: Run, inputs: Inputs) -> np.ndarray | None:
        """The published plan of the layer, [expert, node]."""
        if self.published is None:
            return None
        name = f"{self.model}_{self.published}_{self.mesh}.npz"
        plan = read_plan(run.shared / "reference" / "hd_moe" / name, inputs.moe.moe_layer_ids)
        return plan.share[plan.layer_ids.index(inputs.layer_ids[0])]


FIVE, TEN = "5.0tflops_50.0gbps", "10.0tflops_25.0gbps"
CASES = (
    Case(MIXTRAL, "4x8", "5", "50", FIVE),
    Case(MIXTRAL, "4x4", "5", "50", FIVE),
    Case(DEEPSEEK, "4x8", "5", "50", FIVE),
    Case(MIXTRAL, "4x8", "10", "25", FIVE),
    Case(DEEPSEEK, "4x8", "10", "25", FIVE),
    Case(MIXTRAL, "8x8", "5", "50"),
    Case(DEEPSEEK, "8x8", "5", "50", TEN),
    Case(MIXTRAL, "4x8", "10", "25", FIVE, HOP_LATENCY_NS),
    Case(MIXTRAL, "8x8", "5", "50", None, HOP_LATENCY_NS),
    Case(DEEPSEEK, "4x8", "5", "50", FIVE, HOP_LATENCY_NS),
)
