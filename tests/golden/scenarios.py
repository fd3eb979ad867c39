"""Shipped scenarios made small: few layers, few steps, few tokens; and variants of them with other settings."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_model, load_scenario
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.simulation import IterationBatches, iterations_of, setting_of
from jaxmoe.experiment.strategies import Strategy, given_plans
from jaxmoe.traces import Batch

from .store import Arrays

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "scenarios"


@dataclass(frozen=True)
class Small:
    """A shipped scenario with overrides, its first layers, and how many steps of it."""

    file: str
    overrides: tuple[str, ...]
    layers: int = 2
    steps: int = 2


@dataclass(frozen=True)
class Ready:
    """All that a system is made from; `setting` is that of jaxmoe."""

    inputs: Inputs
    iterations: IterationBatches
    strategy: Strategy
    setting: object

    @property
    def batches(self) -> Batch:
        return self.iterations.batches


def tokens(batch: int, trace: int, *others: str) -> tuple[str, ...]:
    return (f"workload.batch_tokens={batch}", f"workload.trace.tokens={trace}", *others)


def shipped() -> dict[str, Small]:
    """Every shipped scenario by its name, made small; not those whose kernels are fitted anew with their tables."""
    names = (str(path.relative_to(CONFIGS).with_suffix("")) for path in sorted(CONFIGS.rglob("*.yaml")))
    return {name: Small(name, *_size(name)) for name in names if not name.startswith(("deployed/", "served/"))}


def _size(name: str) -> tuple:
    folder = name.split("/")[0] if "/" in name else ""
    if name == "moentwine/deepseek-v3_4x8x8":  # recorded with the longer of memory and products
        return tokens(64, 1024, "hardware=moentwine_4x8x8"), 1, 1
    if name.endswith("4x8x8"):
        return tokens(64, 1024), 1, 1
    if folder == "moentwine":
        return tokens(72, 1024), 2, 3
    if folder == "camoe":
        return tokens(64, 256), 2, 2
    if folder == "wafer_gpu":  # recorded with base in blocks, reads in a stream, and 32 experts that a row predicts
        stream = ("system.split=null", "system.outstanding=null", "system.switching=cut_through", "system.top=32")
        return tokens(64, 1024, *stream), 2, 3
    if folder == "expert_streaming":
        return tokens(32, 512), 2, 3
    return tokens(32, 512), 2, 2


# Settings that no shipped scenario has.
MOENTWINE, MESH = "moentwine/deepseek-v3_6x6", "hd_moe/dynamic_mixtral-8x7b_4x8"
STREAMING, WAFER = "expert_streaming/qwen3-30b-a3b_2x2", "wafer_gpu/deepseek-v2-lite_dojo_5x5"
CHIPLETS, CAMOE = "expert_streaming/hd_moe_2x2", "camoe/qwen3-30b-a3b_4nodes"
WITH_LOGITS = "workload.trace={kind: preset, preset: qwen3-30b-a3b, tokens: 512, logits: 1.0}"
VARIANTS = {
    "moentwine_invasive": (MOENTWINE, "system.migration=invasive", "system.balancer=greedy"),
    "moentwine_eplb_edge": (MOENTWINE, "system.balancer=eplb", "system.weights_from=edge"),
    "moentwine_gradient": (MOENTWINE, "system.balancer=gradient", "system.closing=true"),
    "moentwine_esp": (MOENTWINE, "system.layout=esp", "system.balancer=none"),
    "moentwine_pipelined": (MOENTWINE, "schedule=pipelined(4)"),
    "hd_moe_charged": (MESH, "system.broadcast=charged", "schedule=serial"),
    "hd_moe_background": (MESH, "system.broadcast=charged", "schedule=idle_links", "system.forecast=cross_layer"),
    "hd_moe_last": (MESH, "system.window=last", "system.forecast=perfect"),
    "static_gated": (CHIPLETS, WITH_LOGITS, "system={name: static, plan: hybrid, gate: {lambda_cost: 0.4}}"),
    "streaming_rule5": (
        STREAMING,
        "system.strategy=fse_rule5",
        "system.redistribute=true",
        "system.loaded_by=trajectory",
    ),
    "streaming_prefetch": (STREAMING, "system.strategy=fse_paired", "system.prefetch=moving_average"),
    "wafer_llc": (WAFER, "system.llc_prefetch=true", "system.host_link_GB_per_s=32", "system.host_fixed_us=1"),
    "wafer_popular": (WAFER, "system.popular_copies=4", "system.eviction=least_recent", "system.prediction=perfect"),
    "wafer_program": (WAFER, "system.allocation=linear_program", "system.bound=true"),
    "camoe_node": (CAMOE, "system.copies=node", "system.time_model=congestion", "system.own_node=left_out"),
}


def every() -> dict[str, Small]:
    """Shipped scenarios and variants by name."""
    made = shipped()
    for name, (file, *overrides) in VARIANTS.items():
        base = made[file]
        made[f"variant/{name}"] = Small(file, (*base.overrides, *overrides), base.layers, base.steps)
    return made


@lru_cache(maxsize=2)
def ready(name: str) -> Ready:
    """The scenario read, with a trace of its own, a plan, and a setting for systems."""
    small = every()[name]
    scenario = load_scenario(CONFIGS / f"{small.file}.yaml", list(small.overrides))
    layers = ",".join(map(str, build_model(scenario.model).moe_layer_ids[: small.layers]))
    inputs = inputs_of(scenario, None, layers)
    iterations = iterations_of(inputs, small.steps)
    seen = Inputs(inputs.scenario, inputs.moe, inputs.model, iterations.history, inputs.trace_path)
    (strategy,) = given_plans([scenario.system.plan], seen, taken=(), compared=())
    return Ready(inputs, iterations, strategy, setting_of(inputs, strategy, iterations.history))


FIELDS = ("experts", "token_draw", "draw", "source", "row")


def frozen_batches(batches: Batch) -> Arrays:
    """The tokens of batches, to be stored; all weigh 1."""
    assert (np.asarray(batches.weight) == 1).all()
    return {field: np.asarray(value) for field in FIELDS if (value := getattr(batches, field)) is not None}


def thawed(arrays: Arrays) -> Batch:
    """Batches from stored tokens."""
    kinds = {name: np.int32 if array.dtype.kind in "iu" else np.float32 for name, array in arrays.items()}
    whole = {name: jnp.asarray(array, kinds[name]) for name, array in arrays.items()}
    return Batch(weight=jnp.ones(arrays["experts"].shape[:-1]), **whole)
