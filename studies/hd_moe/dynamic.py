"""Fig. 15: what pre-broadcasting the hottest experts adds to plans tuned on one topic and run on others."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import DEEPSEEK, MIXTRAL, Case, inputs_of, trace_file

from jaxmoe.des import layer_seconds
from jaxmoe.engine import LayerTime, evaluate, rollout
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.methods import (
    AbstractForecast,
    CrossLayer,
    FixedAllowance,
    MovingAverage,
    PerfectForecast,
    PreBroadcast,
    StaticForecast,
    WindowAllowance,
)
from jaxmoe.placement import expert_parallel_balanced, read_plan
from jaxmoe.traces import Batch, read_trace, sample_batches
from jaxmoe.traces.prediction import NextLayer
from jaxmoe.traces.prediction.predictor import shares as as_shares
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.tune import TunerSettings, tune

TOPICS = {
    MIXTRAL: ("coding", "math", "writing", "extraction", "humanities"),
    DEEPSEEK: ("intent", "translation"),
}
SETTINGS = (("5", "50", 2), ("2.5", "75", 5))  # TFLOP/s, GB/s, experts: the paper's two
TOKENS, ITERATIONS, SEED = 512, 10, 7
RATE, PRIOR = 0.5, 10.0  # of the moving average; choices by the frequencies added to each row of the heatmap
WARM = 4  # iterations after which the moving average has seen the topic: the simulator replays that one
QUICK = TunerSettings(restarts=4, steps=200, batches_per_step=4, refine_steps=0)


def dynamic(model: str, machine: tuple[str, str, int], shared: Path) -> list[dict]:
    """All topics, plans and forecasts on one machine."""
    tflops, gbps, experts = machine
    inputs = inputs_of(Case(model, "4x8", tflops, gbps), shared, layers=_all_layers(model, shared))
    forecasts, rows = _forecasts(inputs), []
    for plan, share in _plans(model, inputs, shared).items():
        for topic in TOPICS[model]:
            trace = read_trace(shared / "traces" / model / f"{topic}.npz").select_layers(inputs.layer_ids)
            batches = sample_batches(trace, TOKENS, ITERATIONS, SEED)
            static = evaluate(inputs.model, share, batches)
            fits = _window(inputs, static)
            some = [0, len(share) // 2, len(share) - 1]
            replayed = {row: _simulated(inputs, share, batches, row) for row in some}
            for forecast in forecasts:
                row = {"model": model, "TFLOPs_per_s": tflops, "GB_per_s": gbps, "experts": experts, "plan": plan}
                row |= {"topic": topic, "forecast": forecast, "experts_in_window": f"{fits:.2f}"}
                rows.append(row | _gain(inputs, share, batches, forecasts[forecast], experts, static, replayed))
    return rows


def _all_layers(model: str, shared: Path) -> str:
    return ",".join(map(str, read_trace(trace_file(model, shared)).layer_ids.tolist()))


def _plans(model: str, inputs: Inputs, shared: Path) -> dict[str, jax.Array]:
    """Static deployments: the published plan; balanced EP and the gradient tuner's plan, both by the tuning trace."""
    plan = Case(model, "4x8", "5", "50").published_plan
    published = read_plan(shared / "reference" / "hd_moe" / plan, inputs.moe.moe_layer_ids).share
    balanced = expert_parallel_balanced(count_pairs(inputs.trace).load, inputs.num_nodes)
    problem = replace(placement_problem(inputs), batch_tokens=128)
    plans = {
        "published": published,
        "ep_balanced": balanced,
        "gradient": tune(problem, QUICK).gathered,
    }
    return {name: jnp.asarray(share, jnp.float32) for name, share in plans.items()}


def _forecasts(inputs: Inputs) -> dict[str, AbstractForecast]:
    """Fitted on the tuning trace; the moving average starts from it and sees what runs."""
    counted = count_pairs(inputs.trace)
    frequency = as_shares(counted.load)
    average = MovingAverage(frequency, jnp.asarray(RATE))
    return {
        "tuning loads": StaticForecast(frequency),
        "cross-layer": CrossLayer.from_heatmap(NextLayer.from_counts(counted, PRIOR), average),
        "moving average": average,
        "perfect": PerfectForecast(),
    }


def _window(inputs: Inputs, static: LayerTime) -> float:
    """How many experts fit into the mean time of the layer before, mean over layers (Eq. 17 with h IS elements)."""
    sizes = (inputs.moe.hidden_size, inputs.moe.expert_size, inputs.scenario.costs.weight_bytes_per_element)
    window = WindowAllowance(*(jnp.asarray(float(size)) for size in sizes))
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=-1), static)
    return float(np.asarray(window(inputs.model.machine, mean, 16)).mean())


def _gain(
    inputs: Inputs,
    share: jax.Array,
    batches: Batch,
    forecast: AbstractForecast,
    experts: int,
    static: LayerTime,
    replayed: dict[int, float],
) -> dict[str, str]:
    """Static over dynamic time of the MoE layers, by the model, and by model and simulator on the same few layers.

    `static` and `replayed` are the static times, by the model and by the simulator on these few.
    """
    flops, allowance = inputs.model.costs.flops_per_token_expert, FixedAllowance(jnp.asarray(experts))
    _, times, decided = rollout(PreBroadcast(share, flops, forecast, allowance, experts), inputs.model, batches)
    dynamic = jax.tree.map(lambda leaf: np.swapaxes(np.asarray(leaf), 0, 1), times)
    served = np.swapaxes(np.asarray(decided.served), 0, 1)
    before, after = np.asarray(static.total), dynamic.total
    some = list(replayed)
    simulated = sum(_simulated(inputs, share, batches, row, served) for row in some)
    modelled = before[some, WARM].sum() / after[some, WARM].sum()
    return {
        "static_s": f"{before.mean():.6e}",
        "dynamic_s": f"{after.mean():.6e}",
        "speedup": f"{before.sum() / after.sum():.4f}",
        "compute_speedup": f"{np.asarray(static.compute).sum() / dynamic.compute.sum():.4f}",
        "replayed_model_speedup": f"{modelled:.4f}",
        "replayed_simulated_speedup": f"{sum(replayed.values()) / simulated:.4f}",
    }


def _simulated(inputs: Inputs, share: jax.Array, batches: Batch, row: int, served: np.ndarray | None = None) -> float:
    """Simulated seconds of one layer of one iteration, static unless it is said where tokens are served."""
    batch = jax.tree.map(lambda leaf: np.asarray(leaf[row, WARM]), batches)
    decided = None if served is None else served[row, WARM]
    return layer_seconds(
        describe(inputs, "sharded", inputs.scenario.costs.exchange), np.asarray(share[row]), batch, decided
    )


JOBS = {
    f"dynamic_{model}_{machine[0]}": lambda shared, model=model, machine=machine: dynamic(model, machine, shared)
    for model in (MIXTRAL, DEEPSEEK)
    for machine in SETTINGS
}
