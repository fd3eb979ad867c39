"""Fig. 2: where the time of a decode step goes in serving configurations of whole models, in a minute of one core.

Each is a deployment on H100, H200 or H800, timed by kernels that were measured, as `jaxmoe evaluate
deployed/deepseek-v3_h200_8 --phase decode` does with the options that its row ends with.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxmoe.config import load_scenario
from jaxmoe.experiment.deployment import deployed
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.serving.step import BACK, DENSE, ROUTED, SHARED, THERE, ModelStep, StepLoad

HERE = Path(__file__).parent
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "deployed" / "deepseek-v3_h200_8.yaml"
ATTENTION = ("projections", "decode attention", "prefill attention")
MOVED = (THERE, BACK)  # of layers with experts: MoE's all-to-all, or what stands for it where experts are cut
V3 = "deepseek-v3"


class Serving(NamedTuple):
    """A configuration: `sequences` of `context` tokens on each GPU get a token each.

    With `copies` experts are apart behind DeepEP, so many of them twice, and attention is cut over `tensor` GPUs;
    without, all are cut over all GPUs of a node.
    """

    model: str
    machine: str
    gpus: int
    sequences: float
    context: int
    copies: int | None = None
    tensor: int = 1
    precision: str = "fp8_block"

    @property
    def options(self) -> list[str]:
        """What to `--set` in the scenario."""
        layout: dict[str, object] = {"backend": "sglang", "products": self.precision, "experts": self.precision}
        if self.copies is None:
            layout |= {"tensor": self.gpus}
        else:
            layout |= {"tensor": self.tensor, "data": self.gpus // self.tensor, "expert_ranks": self.gpus}
            layout |= {"exchange": "deepep_low_latency", "redundant_experts": self.copies, "cache": "fp8"}
        # Half of the answers are context on average.
        layout |= {"concurrency": round(self.sequences * self.gpus), "prompt_tokens": self.context - 1}
        told = ", ".join(f"{key}: {value}" for key, value in (layout | {"output_tokens": 2}).items())
        nodes = [] if "x" in self.machine.rpartition("_")[2] else [f"hardware.nodes={self.gpus}"]
        named = [f"hardware={self.machine}", *nodes, f"model={self.model}", "evaluation.layers=null"]
        return [*named, f"deployment={{{told}}}"]

    @property
    def told(self) -> str:
        """Its layout in words."""
        if self.copies is None:
            return "all cut"
        copies = f", {self.copies} copies" if self.copies else ""
        return f"TP {self.tensor}, EP {self.gpus}{copies}"


def on_one_node(model: str) -> list[Serving]:
    """On 8 H200, where the paper's traces were recorded (V-A)."""
    return [Serving(model, "h200_sxm_8", 8, users / 8, 2048) for users in (1, 16, 64, 256)]


def on_four_nodes(model: str) -> list[Serving]:
    """On 32 H200: "multi-node systems (32+ GPUs)", I."""
    return [Serving(model, "h200_sxm_8x4", 32, many, 4096, copies=0) for many in (8.0, 32.0, 128.0)]


LLAMA, MIXTRAL = "llama-4-maverick", "mixtral-8x7b"
SERVED = (
    *on_one_node(V3),
    Serving(V3, "h100_sxm_8", 72, 256.0, 2048, copies=32),  # decode of SGLang's post on 96 H100
    Serving(V3, "h100_sxm_8", 72, 128.0, 4096, copies=32),
    Serving(V3, "h800_8", 320, 32.0, 4096, copies=64, tensor=4),  # decode of DeepSeek-V3's report
    *on_four_nodes(V3),
    *on_four_nodes("kimi-k2"),
    *on_one_node(LLAMA),
    *on_four_nodes(LLAMA),
    *on_four_nodes("qwen3-235b-a22b"),
    *(
        Serving(MIXTRAL, "h100_sxm_8", gpus, users / gpus, 1024, precision="bfloat16")
        for gpus in (2, 4)
        for users in (1, 16, 64, 256)
    ),
)


def breakdown() -> Iterator[dict[str, object]]:
    """A row for each configuration: parts of a step in %, and what its experts' weights take from HBM at least."""
    for served in SERVED:
        own = deployed(load_scenario(SCENARIO, served.options))
        tokens = served.sequences * served.gpus / own.deployment.data  # of a rank
        times = own.step.time(StepLoad(tokens, float(served.context)))
        stages = {name: float(seconds) for name, seconds in times.stages.items()}
        whole = sum(stages.values())
        found = {
            "all_to_all": sum(stages.get(name, 0.0) for name in MOVED),
            "experts": stages[ROUTED],
            "shared_experts": stages.get(SHARED, 0.0),
            "attention": sum(stages.get(name + end, 0.0) for name in ATTENTION for end in ("", DENSE)),
            "sums": stages.get("sum", 0.0) + sum(stages.get(name + DENSE, 0.0) for name in ("sum", *MOVED)),
        }
        found["rest"] = whole - sum(found.values())
        yield {
            "model": served.model,
            "machine": served.machine,
            "gpus": served.gpus,
            "layout": served.told,
            "sequences": served.sequences,
            "context": served.context,
            "step_ms": 1e3 * whole,
            **{f"{name}_percent": 100 * seconds / whole for name, seconds in found.items()},
            "weights_percent": 100 * weights_seconds(own.step, tokens) / whole,
            "options": " ".join(f"--set '{option}'" for option in served.options),
        }


def weights_seconds(step: ModelStep, tokens: float) -> float:
    """What the weights of the experts with tokens take at the full rate of HBM, on the rank with the most choices."""
    touched = float(step.gating(jnp.asarray(tokens * step.deployment.data)).touched)
    bytes_ = step.model.expert_parameters / step.deployment.expert_tensor * WEIGHT_BYTES[step.deployment.experts]
    return len(step.model.moe_layer_ids) * touched * bytes_ / float(step.kernels.sheet.bandwidth)


if __name__ == "__main__":
    make_tables(HERE, [Table("breakdown", breakdown, digits=4)], study_options(__doc__).parse_args())
