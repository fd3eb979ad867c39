"""DeepSeek-V3 as a whole on DGX nodes, NVL72 and wafers, in the step that `jaxmoe evaluate --phase` times.

Writes `deployed.csv`: seconds of a step of decoding by part, and tokens a second and device, without a balancer and
with moentwine's. Machines read memory and multiply one after the other (`die.overlap: false`), as in the tables of
experts alone that stand beside it. About six minutes of a core.
"""

from collections.abc import Iterator
from pathlib import Path

from jaxmoe.config import load_scenario
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.serving.step import StepLoad

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "deepseek-v3_moentwine_4x8x8.yaml"
DEVICES = {"dgx_b200_4x8": 32, "nvl72": 72, "moentwine_8x8": 64, "moentwine_4x8x8": 256}
LAYOUTS = {"moentwine_8x8": "er", "moentwine_4x8x8": "her"}
TOKENS = (16, 64)  # of a device: 64 and 256 of a group of four
CONTEXT = 1024
BALANCERS = ("none", "topology_aware")


def rows(machine: str) -> Iterator[dict[str, object]]:
    """A machine with each number of tokens and balancer."""
    for each in TOKENS:
        tokens = each * DEVICES[machine]
        for balancer in BALANCERS:
            settings = [
                f"hardware={machine}",
                "hardware.die.overlap=false",
                "strategies.hybrid_regions=1",
                f"workload.batch_tokens={tokens}",
                f"workload.trace.tokens={max(4 * tokens, 8192)}",
                "evaluation.iterations=16",
                "evaluation.layers=[3, 41]",
                f"system={{name: moentwine, layout: {LAYOUTS.get(machine, 'er')}, tp: 4, balancer: {balancer}}}",
                f"deployment={{backend: sglang, concurrency: {tokens}, prompt_tokens: {CONTEXT}, output_tokens: 1}}",
            ]
            step = next(compared(load_scenario(SCENARIO, settings))).step
            load = StepLoad(float(tokens), float(CONTEXT))
            seconds, parts = float(step.seconds(load)), step.parts(load)
            found = {f"{name.replace(' ', '_')}_s": float(part) for name, part in parts.items()}
            known = {"machine": machine, "devices": DEVICES[machine], "tokens_of_a_device": each, "balancer": balancer}
            yield known | {"step_s": seconds, "tokens_per_s_device": each / seconds} | found


if __name__ == "__main__":
    table = Table("deployed", rows, [(machine,) for machine in DEVICES], ("machine",), digits=5)
    make_tables(HERE, [table], study_options(__doc__).parse_args())
