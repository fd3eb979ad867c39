"""How long the gate takes with its bias, and Fig. 1: which part of a layer is dispatch.

`python studies/camoe/gate.py` writes `speed.csv` and `breakdown.csv`, in half a minute of one core; see README.md.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from setting import EXPERTS, HERE, LAYERS, ROOT, TOP_K

from jaxmoe.config import build_even_parts, load_scenario
from jaxmoe.engine.gating import biased
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.simulation import iterations_of, mean_stages, simulate
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.methods.camoe.gate import choose

TOKENS, NODES, REPEATS = 4096, 4, 9
SCENARIO = ROOT / "configs" / "scenarios" / "camoe" / "qwen3-30b-a3b_4nodes.yaml"


def speed() -> list[dict]:
    """Seconds of biasing 4,096 tokens in 48 layers, with Top-K and without; the least of several."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((LAYERS, TOKENS, EXPERTS), np.float32))
    bias = jnp.asarray(0.2 * rng.standard_normal((LAYERS, NODES, EXPERTS), np.float32))
    source = jnp.asarray(np.arange(TOKENS) * NODES // TOKENS, jnp.int32)
    add = jax.jit(biased, donate_argnums=0)
    gate = jax.jit(lambda logits: choose(biased(logits, bias, source), TOP_K))
    plain = jax.jit(partial(choose, top_k=TOP_K))
    times: dict[str, list[float]] = {"gather and add": [], "with Top-K": [], "Top-K alone": []}
    logits = jax.block_until_ready(add(logits, bias, source))
    for function in (gate, plain):
        jax.block_until_ready(function(logits))
    for _ in range(REPEATS):
        begin = time.perf_counter()
        logits = jax.block_until_ready(add(logits, bias, source))
        times["gather and add"].append(time.perf_counter() - begin)
        for name, function in (("with Top-K", gate), ("Top-K alone", plain)):
            begin = time.perf_counter()
            jax.block_until_ready(function(logits))
            times[name].append(time.perf_counter() - begin)
    return [
        {"what": name, "least_ms": 1e3 * min(each), "median_ms": 1e3 * float(np.median(each))}
        for name, each in times.items()
    ]


def breakdown() -> list[dict]:
    """Milliseconds of the parts of a layer, mean over a few layers, on A.3's network."""
    scenario = load_scenario(SCENARIO, ["workload.trace.tokens=12184"])
    inputs = inputs_of(scenario, layers="0,1,2,3")
    steps = iterations_of(inputs, 1)
    plan = given_plans([scenario.system.plan], inputs, taken=(), compared=())[0]
    found = simulate(inputs, plan, steps, 1, StageTimer(), lambda *_: None)
    layers = len(inputs.layer_ids)
    stages = {name: 1e3 * value / layers for name, value in mean_stages(found, found.baseline).items()}
    beside = build_even_parts(scenario)(jnp.asarray(float(scenario.workload.batch_tokens)))
    total = stages.pop("total")
    parts = {"attention": 1e3 * float(beside.attention) / LAYERS} | stages
    return [
        {"part": name, "ms": value, "percent": 100 * value / (total + parts["attention"])}
        for name, value in parts.items()
    ]


if __name__ == "__main__":
    make_tables(
        HERE,
        tables_of({"breakdown": breakdown, "speed": speed}, digits=6, timed=["speed"]),
        study_options(__doc__).parse_args(),
    )
