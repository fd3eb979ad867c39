"""Which broadcasts fit into the layer before, under readings of that window, beside the layer's messages.

`python studies/hd_moe/windows.py --shared FOLDER` writes `windows.csv`: how many experts fit by Eq. 17, mean over
layers. The window is the time of the experts before (`last`), of the whole layer with its attention (`last_layer`), or
what that leaves idle of the busiest link (`idle_links`). Attention is that of the published times, or by the machine's
roofline. `beside.csv` has layers of DeepSeek with attention, and on the links that messages leave idle as many
broadcasts as the paper makes, by the model and by the event simulator. Eq. 17 counts one matrix of h x IS elements an
expert, where a gated one has three.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import dynamic
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import published
from cases import DEEPSEEK, HERE, MIXTRAL, ROOT, Case, inputs_of
from summary import MOE_LAYERS

from jaxmoe.config import build_even_parts
from jaxmoe.des import seconds_beside_weights
from jaxmoe.engine import Layer, LayerTime, Movement, evaluate
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.methods import WindowAllowance
from jaxmoe.methods.hd_moe import busiest_link, choose_experts
from jaxmoe.relax import HardMax
from jaxmoe.traces import Batch, read_trace, sample_batches

LIMIT = 16  # experts that are counted at most


@cache
def prepared(model: str, tflops: str, gbps: str, shared: Path) -> tuple[Inputs, dict[str, jax.Array]]:
    inputs = inputs_of(Case(model, "4x8", tflops, gbps), shared, layers=dynamic._all_layers(model, shared))
    return inputs, dynamic._plans(model, inputs, shared)


def attention_of(inputs: Inputs, model: str, tflops: str, shared: Path) -> dict[str, float]:
    """Seconds of attention of one layer, as the published times have it, and by the machine's roofline."""
    fit, tokens = published.fit_attention(published.read(shared), model), dynamic.TOKENS
    whole = float(build_even_parts(inputs.scenario)(jnp.asarray(float(tokens))).attention)
    return {
        "published": fit(inputs.num_nodes, float(tflops), tokens) / MOE_LAYERS[model],
        "roofline": whole / inputs.moe.num_attention_layers,
    }


def ran(inputs: Inputs, share: jax.Array, model: str, topic: str, shared: Path) -> tuple[Batch, LayerTime]:
    """Batches of a topic, and their times [layer, batch] under a static plan."""
    trace = read_trace(shared / "traces" / model / f"{topic}.npz").select_layers(inputs.layer_ids)
    batches = sample_batches(trace, dynamic.TOKENS, dynamic.ITERATIONS, dynamic.SEED)
    return batches, evaluate(inputs.model, share, batches)


def windows(model: str, tflops: str, gbps: str, experts: int, shared: Path) -> Iterator[dict[str, Any]]:
    """How many experts fit, of every plan and topic."""
    inputs, plans = prepared(model, tflops, gbps, shared)
    attention = attention_of(inputs, model, tflops, shared)
    sizes = (inputs.moe.hidden_size, inputs.moe.expert_size, inputs.scenario.costs.weight_bytes_per_element)
    last = WindowAllowance(*(jnp.asarray(float(size)) for size in sizes))
    rules = {"last": last}
    for source, seconds in attention.items():
        rules[f"last_layer, {source}"] = replace(last, attention=jnp.asarray(seconds))
        rules[f"idle_links, {source}"] = replace(last, attention=jnp.asarray(seconds), idle=True)
    for (plan, share), topic in product(plans.items(), dynamic.TOPICS[model]):
        _, static = ran(inputs, share, model, topic, shared)
        mean = replace(static, total=static.total.mean(axis=1))  # busy seconds are means over batches
        row = {"model": model, "TFLOPs_per_s": tflops, "GB_per_s": gbps, "experts": experts, "plan": plan}
        row |= {
            "topic": topic,
            "experts_s": float(mean.total.mean()),
            "busiest_link_s": float(busiest_link(mean).mean()),
        }
        row |= {f"attention_{source}_s": seconds for source, seconds in attention.items()}
        yield row | {name: float(rule(inputs.model.machine, mean, LIMIT).mean()) for name, rule in rules.items()}


def beside(model: str, tflops: str, gbps: str, experts: int, matrices: int, shared: Path) -> Iterator[dict[str, Any]]:
    """A few layers, each while the experts that the next one needs most are broadcast, of so many matrices h x IS."""
    inputs, plans = prepared(model, tflops, gbps, shared)
    size = matrices * inputs.moe.hidden_size * inputs.moe.expert_size * inputs.scenario.costs.weight_bytes_per_element
    attention = attention_of(inputs, model, tflops, shared)["published"]
    described = replace(describe(inputs, "sharded", inputs.scenario.costs.exchange), expert_bytes=size)
    layer = eqx.tree_at(lambda layer: layer.costs.expert_bytes, inputs.model, jnp.asarray(size))
    for (plan, share), topic in product(plans.items(), dynamic.TOPICS[model]):
        batches, _ = ran(inputs, share, model, topic, shared)
        batches = jax.tree.map(lambda leaf: leaf[:, dynamic.WARM : dynamic.WARM + 1], batches)
        static = evaluate(inputs.model, share, batches)
        for row in (0, len(share) // 2, len(share) - 2):
            batch = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row, 0]), batches)
            to_all = destinations(inputs, share[row + 1], batches, row + 1, experts)
            seconds = attention + float(static.total[row, 0])
            busy = sum(each["link"][row] for each in static.busy.values() if "link" in each)
            seen = seconds_beside_weights(
                described, np.asarray(share[row]), batch, np.asarray(share[row + 1], float), to_all, attention
            )
            told = {"model": model, "TFLOPs_per_s": tflops, "GB_per_s": gbps, "experts": experts, "matrices": matrices}
            told |= {"plan": plan, "topic": topic, "layer": row, "layer_s": seconds}
            told |= {"model_s": modelled(layer, seconds, busy, share[row + 1], to_all), "simulated_s": max(seen)}
            yield told | {"simulated_layer_s": seen[0], "simulated_weights_s": seen[1]}


def destinations(inputs: Inputs, share: jax.Array, batches: Batch, row: int, experts: int) -> np.ndarray:
    """1 at all nodes for the experts that are broadcast, whose loads are known (Eq. 13)."""
    tokens = jax.tree.map(lambda leaf: leaf[row, 0], batches)
    load = tokens.choices(share.shape[0]).sum(axis=0)
    each = inputs.model.costs.flops_per_token_expert / inputs.model.machine.die.flops
    chosen = choose_experts(share, load, each, jnp.asarray(experts), experts)
    return np.broadcast_to(np.asarray(chosen)[:, None], share.shape)


def modelled(layer: Layer, seconds: float, busy: Any, share: jax.Array, to_all: np.ndarray) -> float:
    """The layer, the broadcasts alone, or the link that serves both longest: as the schedule `idle_links` has it."""
    stage = Movement(jnp.asarray(to_all, jnp.float32)).stage(layer, share, "background")
    sent = stage.demand.usage(layer.machine, HardMax())
    return max(seconds, float((busy + sent.busy["link"]).max()), float(sent.seconds))


CASES = [(model, *machine) for model in (DEEPSEEK, MIXTRAL) for machine in dynamic.SETTINGS]
KEY = ("model", "TFLOPs_per_s", "GB_per_s", "experts")

if __name__ == "__main__":
    options = study_options(__doc__, resume=True)
    add_shared(options, ROOT.parent / "shared", "traces", "reference")
    given = options.parse_args()
    own = [(*case, matrices) for case in CASES if case[0] == DEEPSEEK for matrices in (1, 3)]
    made = [
        Table("windows", partial(windows, shared=given.shared), CASES, KEY, digits=5),
        Table("beside", partial(beside, shared=given.shared), own, (*KEY, "matrices"), digits=5),
    ]
    make_tables(HERE, made, given)
