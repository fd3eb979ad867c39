"""DeepSeek-V3 on many H800 and H100: tokens a second and GPU of published runs against what kernels tell.

Kernels are those of H100, on H800 at its own data sheet; nothing is fitted to these runs. `waterfall` goes from the
conditions of DeepSeek's profiles to those of its production, one at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jaxmoe.config import load_model
from jaxmoe.config.files import find_kernels
from jaxmoe.config.model import build_model
from jaxmoe.experiment.step_replay import replay_of
from jaxmoe.hardware.gpu.deepep_files import beside, read_exchanges
from jaxmoe.hardware.gpu.files import at_sheet, read_kernels
from jaxmoe.models import MoEModel
from jaxmoe.serving.closed_loop import tokens_of_step
from jaxmoe.serving.deployment import Deployment, Exchange, Overlap
from jaxmoe.serving.gating import SPREAD, expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.step import ModelStep, StepLoad

KERNELS = "kernels/h100_sxm.json"
NORMAL: Exchange = "deepep_normal"
LOW: Exchange = "deepep_low_latency"
EVEN = 0.0  # spread of balanced gating
PREFILL = 16384.0  # tokens of a GPU in a step
ACCEPTANCE = 0.6  # of the token that MTP drafts


@dataclass(frozen=True)
class Run:
    """A run, its conditions: `measured` are tokens/s a GPU, `tokens` those of a GPU that a step adds without drafts."""

    name: str
    load: StepLoad
    tokens: float
    measured: float | None = None
    sheet: str = "h800_sxm"
    ranks: int = 32
    exchange: Exchange = NORMAL
    overlap: Overlap = "two_batches"
    spread: float = EVEN
    redundant: int = 0
    drafted: int = 0

    @property
    def step(self) -> ModelStep:
        """Its step: attention on each GPU by itself, experts over all."""
        deployment = Deployment(
            backend="sglang",
            data=self.ranks,
            expert_ranks=self.ranks,
            products="fp8_block",
            experts="fp8_block",
            cache="fp8",
            overlap=self.overlap,
            exchange=self.exchange,
            redundant=self.redundant,
            drafted=self.drafted,
        )
        model, path = _model(), find_kernels(KERNELS)
        kernels = Kernels(at_sheet(read_kernels(path), self.sheet), "sglang")
        gating = expert_loads(model.num_experts, model.top_k, self.ranks, self.spread, redundant=self.redundant)
        return ModelStep(model, deployment, kernels, gating, read_exchanges(beside(path)))

    def told(self) -> float:
        """Tokens/s a GPU."""
        return self._added / float(self.step.seconds(self._load))

    def replayed(self) -> float:
        """Tokens/s a GPU as the simulator has them, launch by launch."""
        return self._added / replay_of(self.step, self._load).seconds

    @property
    def _load(self) -> StepLoad:
        return self.load._replace(queries=self.step.deployment.queries)

    @property
    def _added(self) -> float:
        return self.tokens * tokens_of_step(self.drafted, ACCEPTANCE)


@cache
def _model() -> MoEModel:
    return build_model(load_model("deepseek-v3", "model"))


def read(prompt: float) -> StepLoad:
    """A step of `PREFILL` tokens of prompts of this length."""
    return StepLoad(0.0, 1.0, PREFILL, prompt)


def decode(sequences: float, context: float) -> StepLoad:
    """A step of so many sequences of a GPU."""
    return StepLoad(sequences, context)


PROFILE = Run("prefill, 4 x 4,096 tokens, EP 32", read(4096.0), PREFILL, 7839.0)
DECODE = Run("decode, 128 x 4,096, EP 128", decode(128.0, 4096.0), 128.0, 2325.0, ranks=128, exchange=LOW)
SKEWED: dict[str, Any] = {"spread": SPREAD, "redundant": 32}  # gating of real text, and copies by EPLB
SGLANG: dict[str, Any] = {"sheet": "h100_sxm", **SKEWED}
RUNS = (
    PROFILE,
    DECODE,
    replace(DECODE, name="decode, 128 x 4,096, EP 128, with MTP", drafted=1),
    *(
        replace(PROFILE, name=f"SGLang on H100, prefill of {size} K, EP 32", load=read(1024.0 * size),
                measured=node / 8, **SGLANG)
        for size, node in ((1, 57674), (2, 54543), (4, 50302))
    ),
    replace(PROFILE, name="SGLang on H100, prefill of 4 K, balanced", measured=59337 / 8, sheet="h100_sxm"),
    replace(PROFILE, name="SGLang on H100, prefill of 4 K, without copies", measured=None, sheet="h100_sxm",
            spread=SPREAD),
    replace(DECODE, name="SGLang on H100, decode, 256 x 2 K, EP 72", load=decode(256.0, 2048.0), tokens=256.0,
            measured=22282 / 8, ranks=72, **SGLANG),
    *(
        replace(DECODE, name=f"SGLang on H100, decode, 128 x 4 K, EP 72{said}", measured=17373 / 8, ranks=72,
                drafted=drafted, **SGLANG)
        for drafted, said in enumerate(("", ", with MTP"))
    ),
)  # fmt: skip


def runs() -> Iterable[dict[str, object]]:
    """A row for each run."""
    for run in RUNS:
        told = run.told()
        error = None if run.measured is None else told / run.measured - 1
        yield {"run": run.name, "measured": run.measured, "told": told, "error": error, "replayed": run.replayed()}


def ratios(rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, object]]:
    """Ratios of SGLang's runs of prefill: lengths of prompts, and balanced over default gating."""
    rate = {str(row["run"]).removeprefix("SGLang on H100, prefill of "): row for row in rows}
    pairs = {
        "1 K over 4 K": ("1 K, EP 32", "4 K, EP 32"),
        "2 K over 4 K": ("2 K, EP 32", "4 K, EP 32"),
        "balanced over default": ("4 K, balanced", "4 K, EP 32"),
        "balanced over default, taken to have no copies": ("4 K, balanced", "4 K, without copies"),
    }
    for name, (one, other) in pairs.items():
        told = rate[one]["told"] / rate[other]["told"]
        default = "4 K, EP 32" if "without" in other else other
        measured = rate[one]["measured"] / rate[default]["measured"]
        yield {"ratio": name, "measured": measured, "told": told, "error": told / measured - 1}


def waterfall() -> Iterable[dict[str, object]]:
    """Conditions of the profile, then of production, one change at a time: tokens/s a GPU told and measured.

    Production is a day's mean: 73.7 k tokens/s a node read, of which 56.3 % are found in the cache and 43.7 %
    computed, and 14.8 k generated, at a mean context of 4,989 tokens and 20 to 22 tokens/s a user.
    """
    own = replace(PROFILE, measured=None)
    prefill = (
        replace(own, name="prefill, kernels in turn", overlap="serial"),
        replace(PROFILE, name="two batches: the profile"),
        replace(own, name="gating of real text, copies by EPLB", **SKEWED),
        replace(own, name="production", load=read(4989.0), measured=73.7e3 * 0.437 / 8, **SKEWED),
    )
    own = replace(DECODE, measured=None)
    users = 14.8e3 / 8 / 21  # sequences of a GPU at 21 tokens/s each
    served: dict[str, Any] = {"load": decode(users, 4989.0), "tokens": users}
    generate = (
        replace(own, name="decode, kernels in turn", overlap="serial"),
        replace(DECODE, name="two batches: the profile"),
        replace(own, name="EP 144, gating of real text, copies by EPLB", ranks=144, **SKEWED),
        replace(DECODE, name="production", ranks=144, measured=14.8e3 / 8, **SKEWED, **served),
    )
    for run in (*prefill, *generate):
        yield {"conditions": run.name, "told": run.told(), "measured": run.measured}
