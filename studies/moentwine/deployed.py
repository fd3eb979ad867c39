"""DeepSeek-V3 as a whole on DGX nodes, NVL72 and wafers, in the step that `jaxmoe evaluate --phase` times.

`deployed.csv` takes the layers of `balancing_adding.csv`, with and without the balancer, and adds all else of the
model: seconds. `deployed_runs.csv` runs the layers anew under token layouts alone, as `jaxmoe evaluate SCENARIO --phase
decode` does: about three minutes of a core.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jaxmoe.config import Scenario, load_scenario
from jaxmoe.engine.times import ATTENTION, EXPERTS, LayerTime
from jaxmoe.experiment.machine_deployment import compared, step_on_machine
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.serving.machine_step import Context, MachineStep, SystemLayers
from jaxmoe.serving.step import StepLoad

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "deepseek-v3_moentwine_4x8x8.yaml"
DEVICES = {"dgx_b200_4x8": 32, "nvl72": 72, "moentwine_8x8": 64, "moentwine_4x8x8": 256}
LAYOUTS = {"moentwine_8x8": "er", "moentwine_4x8x8": "her"}
TOKENS = (16, 64)  # of a device: 64 and 256 of a group of four
CONTEXT = 1024
# Tokens of a device and of its context, as in the balancers' tables.
PHASES = {"prefill": (256, 577.0), "decode": (64, 1260.0)}
STAGES = {"attention": "attention", "all_reduce": "all_reduce", "compute": "experts", "all_to_all": "all_to_all"}
MICRO = 1e-6


def rows() -> Iterator[dict[str, object]]:
    """Tokens a second and device of layers alone and of whole steps, by machine, phase and balancer."""
    for row in read_table(HERE / "balancing_adding.csv"):
        devices, (tokens, context) = int(row["devices"]), PHASES[row["phase"]]
        layer, step = _layer(row), _step(row["machine"], row["memory_and_products"])
        own = MachineStep(step.model, step.deployment, _always(layer), step.beside, step.head)
        load = StepLoad(float(tokens * devices), context)
        if row["phase"] == "prefill":
            load = StepLoad(0.0, 1.0, prefilled=float(tokens * devices), prompt=2 * context)
        seconds, layers = float(own.seconds(load)), len(own.model.moe_layer_ids) * float(layer.total)
        known = ("memory_and_products", "phase", "machine", "devices", "balancer")
        yield {key: row[key] for key in known} | {
            "experts_tokens_per_s_device": tokens / (len(own.model.moe_layer_ids) * float(row["compute_us"]) * MICRO),
            "layers_tokens_per_s_device": tokens / layers,
            "tokens_per_s_device": tokens / seconds,
            "step_s": seconds,
            "beside_layers": 1 - layers / seconds,
        }


def _layer(row: dict[str, str]) -> LayerTime:
    """The mean layer of a row; its parts overlap, so the total is less than their sum."""
    stages = {name: float(row[f"{key}_us"]) * MICRO for key, name in STAGES.items()}
    blocks = ((ATTENTION, ("attention", "all_reduce")), (EXPERTS, ("experts", "all_to_all")))
    return LayerTime(stages, {name: {} for name in stages}, float(row["total_us"]) * MICRO, {}, {}, blocks)


@cache
def _step(machine: str, memory_and_products: str) -> MachineStep:
    """A step without its layers, on a machine whose memory and products `overlap` or `add` up."""
    overlap = str(memory_and_products == "overlap").lower()
    return step_on_machine(_scenario(machine, f"hardware.die.overlap={overlap}"), _always(LayerTime({}, {}, 0.0)))


def _always(time: LayerTime) -> SystemLayers:
    def layer(tokens: int, context: Context) -> LayerTime:
        return time

    return SystemLayers("own", layer)


def _scenario(machine: str, *settings: str) -> Scenario:
    return load_scenario(SCENARIO, [f"hardware={machine}", "strategies.hybrid_regions=1", *settings])


def runs(machine: str) -> Iterator[dict[str, object]]:
    """A step of decoding on a machine whose memory and products add up, by part."""
    for each in TOKENS:
        tokens = each * DEVICES[machine]
        scenario = _scenario(
            machine,
            "hardware.die.overlap=false",
            f"workload.batch_tokens={tokens}",
            f"workload.trace.tokens={max(4 * tokens, 8192)}",
            "evaluation.layers=[3, 41]",
            f"system={{name: moentwine, layout: {LAYOUTS.get(machine, 'er')}, tp: 4, balancer: none}}",
            f"deployment={{backend: sglang, concurrency: {tokens}, prompt_tokens: {CONTEXT}, output_tokens: 1}}",
        )
        step = next(compared(scenario)).step
        load = StepLoad(float(tokens), float(CONTEXT))
        seconds, parts = float(step.seconds(load)), step.parts(load)
        found = {f"{name.replace(' ', '_')}_s": float(part) for name, part in parts.items()}
        known = {"machine": machine, "devices": DEVICES[machine], "tokens_of_a_device": each}
        yield known | {"step_s": seconds, "tokens_per_s_device": each / seconds} | found


if __name__ == "__main__":
    tables = [
        Table("deployed", rows, digits=5),
        Table("deployed_runs", runs, [(machine,) for machine in DEVICES], ("machine",), digits=5),
    ]
    make_tables(HERE, tables, study_options(__doc__).parse_args())
