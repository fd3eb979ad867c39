"""Expert streaming on chiplets: the layer alone (Fig. 9, 12), end to end (Fig. 14, 15), larger arrays (Fig. 18).

Writes `layer.csv`, `layer_each_way.csv`, `arrays.csv` and `end_to_end.csv`, or those that are named after the command,
model by model: `python studies/expert_streaming/study.py layer --only qwen3`.
Traces are synthetic: no recording of the four models is at hand. Sizes of experts are those of Table I.

Table `layer` takes about a minute of one core for a model.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.simulation import batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.methods import system_of
from jaxmoe.methods.expert_streaming.system import StreamedRun

HERE = Path(__file__).parent
SCENARIOS = HERE.parents[1] / "configs" / "scenarios" / "expert_streaming"
# Experts as in Table I, which halves two of the published sizes; micro-slices are of a die's slice.
MODELS = {
    "phi-3.5-moe": ["model.expert_size=3200", "system.micro_slices=8"],
    "yuan2.0-m32": ["model.expert_size=4096", "system.micro_slices=8"],
    "deepseek-moe-16b": [],
    "qwen3-30b-a3b": [],
}
TOKENS = (16, 64, 256, 1024)
LAYERS, STEPS = "0,1,2,3", 4
END_LAYERS, END_STEPS = LAYERS, 100
SLACKS = (0.1, 0.2, 0.3)
END_TOKENS = (16, 64)
LAYER_CUTS = (1, 2, 4, 8, 16)
EACH_WAY = "hardware.link.bandwidth_GB_per_s=72"
ARRAYS, ARRAY_TOKENS = ("2x2", "3x3", "4x4"), (64, 256, 1024)
ARRAY_RUNS, ARRAY_CUTS = ("ep", "hydra", "ep_prefetch", "fse_tokens_prefetch", "expert_streaming"), (1, 2, 4, 8)


def ready(model: str, tokens: int, layers: str, steps: int, *overrides: str) -> tuple[dict[str, Any], Any, Any]:
    """Runs of a scenario by name, its iterations, and its inputs."""
    path = SCENARIOS / f"{model}_2x2.yaml"
    first = "1,2,3,4,5,6,7,8" if model.startswith("deepseek") else layers  # its layer 0 is dense
    number = len(layers.split(","))
    shown = ",".join(first.split(",")[:number])
    needed = f"workload.trace.tokens={max(16384, tokens * (steps + 1))}"
    settings = [*MODELS[model], f"workload.batch_tokens={tokens}", needed, *overrides]
    inputs = read_inputs(path, settings, None, shown)
    iterations = iterations_of(inputs, steps)
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    strategy = given_plans(["ep_balanced"], inputs, taken=(), compared=())[0]
    return system.runs(setting_of(inputs, strategy, iterations.history)), iterations, inputs


def layer_rows(model: str, *machine: str) -> Iterator[dict[str, Any]]:
    """Single layers without attention: every strategy with every cut, by model and by event simulator."""
    for tokens in TOKENS:
        settings = ("system.attention=false", "system.strategy=fse_rule5", *machine)
        runs, iterations, _ = ready(model, tokens, LAYERS, STEPS, *settings)
        for name, whole in runs.items():
            for cut, run in cuts_of(whole):
                rolled = run.rollout(iterations.batches)
                spots = [(step, row) for step in (0, STEPS - 1) for row in range(rolled.time.total.shape[1])]
                seen = [replayed(run, rolled, iterations, *spot) for spot in spots]
                modelled = np.array([rolled.compared[spot] for spot in spots])
                yield {
                    "model": model,
                    "tokens": tokens,
                    "strategy": "fse_rule5" if name == "expert_streaming" else name,
                    "micro_slices": cut,
                    "model_s": modelled.mean(),
                    "simulated_s": np.mean([each[0] for each in seen]),
                    "package_memory_MB": max(each[1] for each in seen) / 1e6,
                    "utilisation": np.mean([each[2] for each in seen]),
                }


def each_way_rows(model: str) -> Iterator[dict[str, Any]]:
    """The same where 288 GB/s are what a die has both ways on both its links."""
    return layer_rows(model, EACH_WAY)


def cuts_of(run: Any) -> Iterator[tuple[int | str, Any]]:
    """A run with slices in as many of `LAYER_CUTS` as its buffers can pass on; as it is where slices are not cut."""
    if not isinstance(run, StreamedRun) or run.method.rules.uncut:
        yield "", run
        return
    for cut in LAYER_CUTS:
        costs = replace(run.costs, micro_slices=jnp.asarray(float(cut)))
        each = replace(run, layer=replace(run.layer, costs=costs))
        if float(each.costs.slots) >= each.costs.dies:
            yield cut, each


def replayed(run: Any, rolled: Any, iterations: Any, step: int, row: int) -> tuple[float, float, float]:
    """Simulated seconds, bytes of weights held at most in the package, and the part of the time that arrays compute."""
    if isinstance(run, StreamedRun):
        seen = run.simulated(rolled, step, row)
        held = seen.buffers.peak_together * float(run.costs.slice_bytes)
        return seen.seconds + float(run.layer.scheduling), held, float(seen.compute_busy.mean() / seen.seconds)
    seconds = run.replay(rolled, batch_at(iterations, row, step), step, row)
    busy = rolled.time.busy["compute"]["node"][step, row].mean()
    return seconds, rolled.figures["package_memory_B"], float(busy / seconds)


def end_rows(model: str) -> Iterator[dict[str, Any]]:
    """A hundred iterations with attention, by the model: throughput, and the utilisation of the experts' part."""
    for tokens in END_TOKENS:
        runs, iterations, _ = ready(model, tokens, END_LAYERS, END_STEPS, "system.strategy=fse_rule5")
        named = [
            ("fse_rule5" if name == "expert_streaming" else name, run)
            for name, run in runs.items()
            if "hydra" not in name
        ]
        for slack in SLACKS:
            # Places of requests that wait stay empty; `readings.py buffering` has the other ways.
            empty = ("system.spare_requests=0", "system.arrive_together=true")
            settings = ("system.strategy=fse_buffered", f"system.slack={slack}", *empty)
            deferring, _, _ = ready(model, tokens, END_LAYERS, END_STEPS, *settings)
            named.append((f"fse_buffered_{slack:g}", deferring["expert_streaming"]))
        for name, run in named:
            rolled = run.rollout(iterations.batches)
            passes = rolled.figures.get("finished_passes", tokens * END_STEPS)
            yield {
                "model": model,
                "tokens": tokens,
                "strategy": name,
                "token_layers_per_s": passes * rolled.time.total.shape[1] / rolled.time.total.sum(),
                "utilisation": rolled.figures["utilisation"],
                "attention_share": rolled.time.stages["attention"].sum() / rolled.time.total.sum(),
            }
        jax.clear_caches()


def array_rows(shape: str) -> Iterator[dict[str, Any]]:
    """Qwen3 on larger arrays (Fig. 18): tokens in all as on 2x2, simulated. FSE-DP has the fastest of `ARRAY_CUTS`."""
    for tokens in ARRAY_TOKENS:
        cut = {cut: array_runs(shape, tokens, cut) for cut in ARRAY_CUTS}
        runs, iterations = cut[ARRAY_CUTS[0]]
        for name in ARRAY_RUNS:
            if name == "expert_streaming":
                tried = {cut: array_row(each[0][name], each[1]) for cut, each in cut.items()}
                best = min(tried, key=lambda cut: tried[cut]["simulated_s"])
                found = {"strategy": "fse_paired", "micro_slices": best, **tried[best]}
            else:
                found = {"strategy": name, "micro_slices": "", **array_row(runs[name], iterations)}
            yield {"array": shape, "tokens": tokens, **found}


def array_runs(shape: str, tokens: int, cut: int) -> tuple[dict[str, Any], Any]:
    """Runs on an array by name, and their iterations."""
    strategy = ("system.attention=false", "system.strategy=fse_paired", f"system.micro_slices={cut}")
    machine = (f"hardware=chiplets_{shape}", "strategies.hybrid_regions=1")
    return ready("qwen3-30b-a3b", tokens, "0,1", 2, *strategy, *machine)[:2]


def array_row(run: Any, iterations: Any) -> dict[str, float]:
    rolled = run.rollout(iterations.batches)
    seen = [replayed(run, rolled, iterations, step, row) for step in range(2) for row in range(2)]
    return {
        "model_s": rolled.compared[:2, :2].mean(),
        "simulated_s": float(np.mean([each[0] for each in seen])),
        "utilisation": float(np.mean([each[2] for each in seen])),
    }


BY_MODEL = [(model,) for model in MODELS]
TABLES = [
    Table("layer", layer_rows, BY_MODEL, ("model",), digits=5),
    Table("layer_each_way", each_way_rows, BY_MODEL, ("model",), digits=5),
    Table("arrays", array_rows, [(shape,) for shape in ARRAYS], ("array",), digits=5),
    Table("end_to_end", end_rows, BY_MODEL, ("model",), digits=5),
]

if __name__ == "__main__":
    make_tables(HERE, TABLES, study_options(__doc__).parse_args())
