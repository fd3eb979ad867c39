"""Cells of the cross table: what is timed on a machine for a model, phase by phase; see README.md."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from jaxmoe.config import Scenario, build_model, load_model, load_scenario_with, resolved
from jaxmoe.config.explain import ConfigSource
from jaxmoe.config.systems import SystemConfig
from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import NODE
from jaxmoe.errors import InputError
from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.evaluation import replay
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.simulation import batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import Strategy, strategy
from jaxmoe.experiment.table import script_options
from jaxmoe.methods import METHODS, system_of
from jaxmoe.models import MoEModel
from jaxmoe.placement.exchange import EXCHANGES
from jaxmoe.placement.named import compared_strategies
from jaxmoe.traces import GatingTrace, synthetic_trace, write_trace
from jaxmoe.traces.synthesis import PRESETS, fit_process, preset_process, sample_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIGS = ROOT / "configs"
PLACEMENT = "ep_balanced"  # under exchanges and systems
TOKENS, LOGITS, SEED = 16384, 1.0, 0  # of the trace of a model
REGIONS = (4, 5, 3)  # of hybrids, and nodes of a group of moentwine: the first that cuts a mesh into equal rectangles
COMMON = {
    "costs.bytes_per_element": 2,
    "costs.weight_bytes_per_element": 1,
    "validation.batches": 1,
}
# Tokens of a layer, and batches or iterations. Tokens of decode are of many requests, those of prefill of runs of text.
PHASES: dict[str, dict[str, Any]] = {
    "decode_32": {"workload.batch_tokens": 32, "evaluation.batches": 4},
    "decode_128": {"workload.batch_tokens": 128, "evaluation.batches": 4},
    "decode_512": {"workload.batch_tokens": 512, "evaluation.batches": 4},
    "prefill_2048": {"workload.batch_tokens": 2048, "evaluation.batches": 2, "workload.sampling": "consecutive"},
}
EXCHANGES_IN = "decode_128"
REPLAYED = 2**16  # nodes times tokens up to which the first batch or iteration of a cell is replayed too
STREAMED = 2**15  # experts times pairs of dies up to which streams are: every slice of an expert goes from die to die
FASTER = 1e6  # times the bandwidth of memory, to see whether nodes wait for it
SAME = 1e-6  # two sums of the same seconds in single precision differ by no more, relatively
Cell = dict[str, Any]  # `total_s` and more, or the `reason` why there is none
Way = tuple[str, str, str]  # phase, kind and name


class Column:
    """One model on one machine. What fails for all of it fails when it is first asked for."""

    def __init__(self, machine: str, model: str, folder: Path) -> None:
        self.machine, self.model, self.folder = machine, model, folder

    def scenario(self, phase: str) -> Scenario:
        """What is timed. Raises `InputError` where the machine computes nothing."""
        values = COMMON | PHASES[phase] | {"hardware": self.machine, "model": self.model}
        base, source = CONFIGS / "scenarios" / "quickstart.yaml", ConfigSource("cross.py", HERE)
        for regions in REGIONS:
            try:
                return load_scenario_with(base, values | {"strategies.hybrid_regions": regions}, source)
            except InputError as error:
                if "hybrid_regions" not in str(error) or regions == REGIONS[-1]:
                    raise
        raise AssertionError

    @property
    def version(self) -> str:
        """The same for the same code and scenario: what cells of this column depend on."""
        try:
            scenarios = [json.dumps(resolved(self.scenario(phase)), sort_keys=True) for phase in PHASES]
        except InputError as error:
            scenarios = [str(error)]
        return _digest(code_version(), *scenarios)

    @cached_property
    def base(self) -> Inputs:
        """One layer in the middle of the model, on its trace."""
        scenario = self.scenario(EXCHANGES_IN)
        layer = middle_layer(build_model(scenario.model))
        return inputs_of(scenario, trace_of(self.model, self.folder), layers=str(layer))

    @cache  # noqa: B019  # a column lives as long as its cells
    def phase(self, name: str) -> "Phase":
        return Phase(replace(self.base, scenario=self.scenario(name)), name)

    def ways(self) -> Iterator[tuple[Way, Callable[[], Cell]]]:
        """All rows of the table, in order."""
        for phase in PHASES:
            for name in compared_strategies():
                yield (phase, "strategy", name), partial(self._cell, phase, Phase.of_strategy, name)
            for name in EXCHANGES.names if phase == EXCHANGES_IN else ():
                yield (phase, "exchange", name), partial(self._cell, phase, Phase.of_exchange, name)
            for name in METHODS:
                yield (phase, "system", name), partial(self._cell, phase, Phase.of_system, name)

    def _cell(self, phase: str, of: Callable[["Phase", str], Cell], name: str) -> Cell:
        return of(self.phase(phase), name)


class Phase:
    """A column with batches of one size."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        self.inputs, self.name = inputs, name
        self.simulated = inputs.num_nodes * inputs.scenario.workload.batch_tokens <= REPLAYED

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        return {usual.name: usual for usual in standard_strategies(self.inputs)}

    @cached_property
    def unlimited(self) -> Inputs:
        """The same machine with memory that nobody waits for."""

        def widths(model: Any) -> list[Any]:
            return [level.bandwidth for level in model.machine.memory]

        fast = eqx.tree_at(widths, self.inputs.model, replace_fn=lambda width: width * FASTER)
        return replace(self.inputs, model=fast)

    def of_strategy(self, name: str) -> Cell:
        """The strategy under its own exchange."""
        return self._scored(self.strategies[name])

    def of_exchange(self, name: str) -> Cell:
        """The exchange, with the same placement as all others."""
        self.inputs.exchange(name)
        return self._scored(strategy(self.inputs, PLACEMENT, self.strategies[PLACEMENT].placement.share, name))

    def of_system(self, name: str) -> Cell:
        """The system on the same placement, as a mean over iterations."""
        parts = {"tp": self.inputs.scenario.strategies.hybrid_regions} if name == "moentwine" else {}
        section = SystemConfig.model_validate({"name": name} | parts)
        if section.keeps_requests and self.name.startswith("prefill"):
            return {"reason": f"system {name} serves requests that decode, a token of each at a time"}
        usual = self.strategies[PLACEMENT]
        if not usual.fits:
            return {"reason": usual.note}
        inputs = replace(self.inputs, scenario=self.inputs.scenario.model_copy(update={"system": section}))
        iterations = iterations_of(inputs, inputs.scenario.evaluation.batches)
        run = system_of(name, **parts).runs(setting_of(inputs, usual, iterations.history))[name]
        rolled = run.rollout(iterations.batches)
        cell = _told(rolled.time, bottleneck(rolled.time))
        if self.simulated and (name != "expert_streaming" or self._streams_few):
            cell["model_s"] = float(rolled.compared[0, 0])
            cell["simulated_s"] = float(run.replay(rolled, batch_at(iterations, 0, 0), 0, 0))
        return cell

    @property
    def _streams_few(self) -> bool:
        return self.inputs.num_nodes**2 * self.inputs.moe.num_experts <= STREAMED

    def _scored(self, chosen: Strategy) -> Cell:
        if not (chosen.fits and chosen.comparable):
            return {"reason": chosen.note}
        time = score(self.inputs, chosen, self.inputs.evaluation_batches)
        limit = bottleneck(time)
        if limit == "compute: node":
            limit = "compute: memory" if self._waits(chosen, time) else "compute: FLOPs"
        cell = _told(time, limit) | {"exchange": chosen.placement.exchange[0]}
        if self.simulated:
            replayed = replay(self.inputs, chosen, self.inputs.validation_batches, lambda *_: None)
            cell["model_s"] = float(time.total[0, 0])
            cell["simulated_s"] = float(replayed.time.total[0, 0])
        return cell

    def _waits(self, chosen: Strategy, time: LayerTime) -> bool:
        """Whether nodes would take less than half as long if memory were fast."""
        if not self.inputs.model.machine.memory:
            return False
        fast = score(self.unlimited, chosen, self.inputs.evaluation_batches)
        return float(fast.compute.mean()) < 0.5 * float(time.compute.mean())


def _told(time: LayerTime, limit: str) -> Cell:
    cell: Cell = {"total_s": float(time.total.mean()), "bottleneck": limit}
    return cell | ({"energy_J": float(np.mean(time.total_energy))} if time.energy else {})


def bottleneck(time: LayerTime) -> str:
    """The stage that takes longest, and its busiest kind of resource.

    `latency` where no resource is busy for half of the stage; the stage alone where its resources are not told.
    """
    stage = max(time.stages, key=lambda name: float(np.mean(time.stages[name])))
    busy = {kind: np.asarray(seconds) for kind, seconds in time.busy.get(stage, {}).items() if np.size(seconds)}
    if not busy:
        return stage
    most = {kind: float(seconds.max(axis=-1).mean()) for kind, seconds in busy.items()}
    # A node as a whole, not the part that it waits for, which compiled code may round up.
    kind = max(most, key=lambda kind: most[kind] * (1 + SAME * (kind == NODE)))
    return f"{stage}: {kind}" if most[kind] >= 0.5 * float(np.mean(time.stages[stage])) else f"{stage}: latency"


# The trace of a model: one layer in the middle of it, with logits, which a biased gate needs.


def middle_layer(moe: MoEModel) -> int:
    return moe.moe_layer_ids[len(moe.moe_layer_ids) // 2]


def trace_of(model: str, folder: Path) -> Path:
    """A file with it, drawn once for all machines, in a process of its own that compiles for speed."""
    path = folder / f"trace_{model}_{code_version()}.npz"
    if not path.exists():
        subprocess.run([sys.executable, __file__, model, str(path)], check=True, env=os.environ | {"XLA_FLAGS": ""})
    return path


def drawn(model: str) -> GatingTrace:
    """Like the model where there is a preset, else with a few popular experts."""
    moe = build_model(load_model(model, "cross.py"))
    layer = (middle_layer(moe),)
    if model in PRESETS:
        process = preset_process(model).up_to(layer)
        return sample_trace(process, TOKENS, SEED, logits=LOGITS).select_layers(layer)
    shape = {"layer_ids": layer, "num_experts": moe.num_experts, "top_k": moe.top_k}
    plain = synthetic_trace(TOKENS, skew=0.5, coactivation=0.2, reuse=0.2, seed=SEED, **shape)
    return sample_trace(fit_process(plain, SEED), TOKENS, SEED, logits=LOGITS)


@cache
def code_version() -> str:
    """A digest of all code that cells may depend on, whatever its comments and its format, and of what it runs on."""
    parts = [ROOT / "jaxmoe" / name for name in ("cli", "report")]  # these compute nothing
    files = [path for path in sorted((ROOT / "jaxmoe").rglob("*.py")) if not any(map(path.is_relative_to, parts))]
    trees = (ast.dump(ast.parse(path.read_bytes())) for path in (*files, Path(__file__)))
    return _digest(jax.__version__, np.__version__, *trees)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    parser = script_options(f"{__doc__}\n\nBy itself it draws the trace of a model, as cross.py asks it to.")
    parser.add_argument("model", help="the name of the model")
    parser.add_argument("file", type=Path, help="the trace to write")
    given = parser.parse_args()
    write_trace(given.file, drawn(given.model))
