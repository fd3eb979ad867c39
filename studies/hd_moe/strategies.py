"""Fig. 8 to 14: time by strategy, machine and batch size, counted in four ways, and loads of nodes and links.

`equations`: four bytes per element everywhere, as Eq. 2 and 4 have it, and compute on batches drawn from the trace.
`mean_frequencies`: so, but compute by Eq. 1 with the mean frequencies of the trace.
`one_byte`: one byte per element where results gather and four in rings, as the published times have it
(`reference/hd_moe/README.md`). `published`: so, and compute by Eq. 1: published compute times are proportional to the
batch size, which those of drawn batches are not.
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from cases import BATCH_SIZES, CASES, DEEPSEEK, LAYERS, Case, inputs_of
from tuners import plans_of

from jaxmoe.engine import LayerTime
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy, strategy, strategy_settings
from jaxmoe.placement import expert_parallel_random, hybrid, tensor_parallel
from jaxmoe.placement.exchange import Rings, exchange_of
from jaxmoe.placement.named import region_rings
from jaxmoe.traces import Batch
from jaxmoe.traces.statistics.counting import count_pairs

FEWER = ("evaluation.batches=16",)  # of every size
ONE_BYTE = ("costs.bytes_per_element=1",)
SEED = 0


def strategies(inputs: Inputs, plans: dict[str, np.ndarray]) -> list[Strategy]:
    """The paper's four, the stages of two of them, ours, and the published plan where there is one."""
    layers, experts, nodes = len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes
    loads, regions = count_pairs(inputs.trace).load, inputs.scenario.strategies.hybrid_regions
    # With fewer experts than nodes each has its own equal part of the mesh: only so do the published times of
    # Mixtral's EP, whose compute is 1.39 times even, come about.
    ep = (
        hybrid(loads, inputs.shape, experts)
        if experts < nodes
        else expert_parallel_random(layers, experts, nodes, SEED)
    )
    regional, rings = (
        hybrid(loads, inputs.shape, regions),
        replace(region_rings(inputs.model.machine.topology, strategy_settings(inputs)), between=False),
    )
    made = [
        strategy(inputs, "tp", tensor_parallel(layers, experts, nodes), "ring"),
        strategy(inputs, "tp_both_ways", tensor_parallel(layers, experts, nodes), "ring_both_ways"),
        strategy(inputs, "ep", ep),
        strategy(inputs, "hybrid", regional),
        strategy(inputs, "hybrid_ring", regional, rings.name),
    ]
    named = {"node": "node", "node_link": "node_link", "gradient": "gradient", "published": "published_plan"}
    return made + [strategy(inputs, shown, plans[name]) for name, shown in named.items() if name in plans]


def times(case: Case, shared: Path) -> list[dict]:
    """Mean seconds of one MoE layer, every strategy and batch size, in all countings."""
    four, one = inputs_of(case, shared, FEWER), inputs_of(case, shared, (*FEWER, *ONE_BYTE))
    rows, plans = [], plans_of(case)
    drawn = {tokens: padded(four.batches_of(tokens), max(BATCH_SIZES)) for tokens in BATCH_SIZES}
    for plan in strategies(four, plans):
        rings = isinstance(exchange_of(plan.placement.exchange[0]), Rings)
        for tokens, batches in drawn.items():
            seen, gathered = (score(inputs, plan, batches) for inputs in (four, four if rings else one))
            about = case.columns | {"layers": LAYERS[case.model], "batch_tokens": tokens, "strategy": plan.name}
            mean = _mean_compute(four, plan, tokens)
            rows.append(about | {"counting": "equations"} | _seconds(seen))
            rows.append(about | {"counting": "mean_frequencies"} | _seconds(seen, mean))
            rows.append(about | {"counting": "one_byte"} | _seconds(gathered))
            rows.append(about | {"counting": "published"} | _seconds(gathered, mean))
    return rows


def padded(batches: Batch, tokens: int) -> Batch:
    """The same batches as if of more tokens, those of weight 0: sizes that share a shape compile once."""
    more = tokens - batches.weight.shape[-1]
    return Batch(
        experts=jnp.pad(batches.experts, ((0, 0), (0, 0), (0, more), (0, 0)), constant_values=-1),
        token_draw=jnp.pad(batches.token_draw, ((0, 0), (0, 0), (0, more))),
        draw=jnp.pad(batches.draw, ((0, 0), (0, 0), (0, more), (0, 0))),
        weight=jnp.pad(batches.weight, ((0, 0), (0, 0), (0, more))),
    )


def _mean_compute(inputs: Inputs, plan: Strategy, tokens: int) -> float:
    """Eq. 1 with the trace's mean frequencies, s, mean over layers."""
    frequency = placement_problem(inputs).frequency
    work = tokens * inputs.moe.top_k * np.einsum("le,len->ln", frequency, plan.placement.share)
    seconds = (
        work * float(inputs.model.costs.flops_per_token_expert) / np.asarray(inputs.model.machine.die.flops, float)
    )
    return float(seconds.max(axis=1).mean())


def loads(case: Case, shared: Path) -> list[dict]:
    """Fig. 12 and 14: how long each node computes and each link is busy, of the first layer, by the equations."""
    inputs, plans = inputs_of(case, shared), plans_of(case)
    rows = []
    for plan in strategies(inputs, plans):
        if plan.name in ("ep", "node", "node_link", "gradient"):
            seen = score(inputs, plan, inputs.evaluation_batches)
            for kind, busy in (("node", seen.node_time[0]), ("link", seen.link_time[0])):
                rows += [
                    {"model": case.model, "mesh": case.mesh, "strategy": plan.name, "kind": kind, "index": index}
                    | {"seconds": f"{value:.6e}"}
                    for index, value in enumerate(busy)
                ]
    return rows


def _seconds(seen: LayerTime, mean_compute: float | None = None) -> dict[str, str]:
    """Mean seconds of the stages, the compute by Eq. 1 in place of the drawn batches' where it is given."""
    parts = {"dispatch": seen.dispatch.mean(), "compute": seen.compute.mean(), "combine": seen.combine.mean()}
    if mean_compute is not None:
        parts["compute"] = mean_compute
    return {f"{name}_s": f"{seconds:.6e}" for name, seconds in (parts | {"total": sum(parts.values())}).items()}


SHOWN = next(case for case in CASES if (case.model, case.mesh, case.tflops) == (DEEPSEEK, "4x8", "5"))
LATER = {f"times_{case.name}": lambda shared, case=case: times(case, shared) for case in CASES} | {
    "loads": lambda shared: loads(SHOWN, shared)
}
