"""Contents of `summary.json`: provenance of a run, and the comparison of its strategies. All times are in seconds."""

import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from jaxmoe.config import element_bytes, resolved, unstated_energy
from jaxmoe.experiment.comparison import Comparison, time_under_best
from jaxmoe.experiment.inputs import EVALUATION_SEEDS, Inputs
from jaxmoe.experiment.limits import LayerLimit, layer_limit, layer_limits, usual_limit
from jaxmoe.experiment.strategies import TUNED, Strategy, weights_on_nodes
from jaxmoe.experiment.validation import agreement
from jaxmoe.experiment.whole_model import WholeModel, step_report
from jaxmoe.tune import History, PlacementProblem, TuneResult
from jaxmoe.tune.regions import FrontPoint


def provenance(command: str, inputs: Inputs) -> dict[str, Any]:
    """The part of a summary that all commands on scenarios share: scenario, seed, versions, device, trace, batches."""
    return {
        "command": command,
        "scenario": resolved(inputs.scenario),
        "seed": inputs.scenario.seed,
        "bytes_per_element": vars(element_bytes(inputs.scenario)),
        **surroundings(),
        "trace": {
            "path": inputs.trace_path,
            "tokens": inputs.trace.num_tokens,
            "layers": len(inputs.layer_ids),
            "facts": inputs.trace.facts,
        },
        "evaluation": {
            "batches": inputs.scenario.evaluation.batches,
            "batch_tokens": inputs.scenario.workload.batch_tokens,
            "seed": inputs.scenario.evaluation.seed,
            "seed_offset": EVALUATION_SEEDS,
            "replayed_batches": inputs.scenario.validation.batches,
        },
        "layer_ids": list(inputs.layer_ids),
    }


def surroundings() -> dict[str, Any]:
    """Versions of the software, and the device that it runs on."""
    versions = {name: version(name) for name in ("jaxmoe", "jax", "jaxlib", "numpy")}
    return {"versions": versions | {"python": platform.python_version()}, "device": _device()}


def comparison_report(inputs: Inputs, comparison: Comparison) -> dict[str, Any]:
    """Every strategy by layer and on average, which is best where, and how the simulator agrees."""
    return {
        "strategies": {name: _strategy(inputs, comparison, name) for name in comparison.strategies},
        "totals": {name: float(score.mean.sum()) for name, score in comparison.scores.items()},
        "best": [_best(comparison, row, layer) for row, layer in enumerate(inputs.layer_ids)],
        "exchanges": list(inputs.exchanges),
        "bound_s": None if comparison.bound is None else per_layer(comparison.bound),
        "agreement": _agreement(comparison),
        "whole_model": whole_model_report(inputs, comparison),
    }


def whole_model_report(inputs: Inputs, comparison: Comparison) -> dict[str, Any]:
    """Seconds of one step: attention, dense FFNs, shared experts, and with the MoE layers of every strategy.

    MoE layers that this run leaves out count as the mean of those it has. Where the model does not give what is
    needed, `missing` says what. `best` are steps under the best exchange of every layer.
    """
    model = WholeModel.of(inputs)
    best = {name: comparison.best(name) for name, each in comparison.strategies.items() if each.comparable}
    told = model.report() | {
        "counted": model.counted,
        "best": {name: step_report(model.step(float(each.mean.mean()))) for name, each in best.items()},
    }
    if model.missing:
        return told
    own = {name: float(score.mean.mean()) for name, score in comparison.scores.items()}
    return told | {
        "moe_s": {name: seconds * model.layers for name, seconds in own.items()},
        "tbt_s": {name: model.step(seconds).seconds for name, seconds in own.items()},
    }


def tuning_report(result: TuneResult, comparison: Comparison) -> dict[str, Any]:
    """How the plan came about. Stages and the bound are as the tuner saw them, on its own batches."""
    return {
        "stages": {f"{name}_s": per_layer(seconds) for name, seconds in result.stages.items()},
        "bound_s": per_layer(result.bound),
        "gap": _gap(comparison),
        "stopped": result.stopped,
        "seed": result.seed,
        "wall_s": result.seconds,
        "history": {stage: _history(history) for stage, history in result.history.items()},
    }


def front_report(inputs: Inputs, problem: PlacementProblem, front: Sequence[FrontPoint]) -> dict[str, Any]:
    """Bytes against time: how many copies of every expert the plan of `problem` has, and the front of all numbers.

    Each has the mean weights of a node, of the layers of the run, and a layer's time under the best plan that was found
    with so many, on the tuner's own batches. A number is not searched, and its time `None`, where its bound is not
    below the time of fewer copies.
    """
    weights = float(inputs.model.costs.expert_bytes) * inputs.moe.num_experts * len(inputs.layer_ids) / inputs.num_nodes
    points = [
        {"copies": each.copies, "weights_mean_B": each.copies * weights, "time_s": each.seconds, "bound_s": each.bound}
        for each in front
    ]
    return {"copies": math.prod(problem.regions), "front": points}


def per_layer(seconds: np.ndarray) -> dict[str, Any]:
    """Seconds of every layer, and their mean."""
    return {"mean": float(seconds.mean()), "layers": seconds.astype(float).tolist()}


def _strategy(inputs: Inputs, comparison: Comparison, name: str) -> dict[str, Any]:
    strategy = comparison.strategies[name]
    seconds, best = _seconds(comparison, name), comparison.best(name)
    topology = inputs.model.machine.topology
    own, best_limits = layer_limits(comparison.scores[name], topology), [layer_limit(t, topology) for t in best.times]
    limits = _limits(inputs, comparison, name, own)
    return {
        "fits": strategy.fits,
        "comparable": strategy.comparable,
        "note": strategy.note,
        "mode": strategy.placement.mode,
        "memory": memory_report(inputs, strategy),
        "mean": {key: float(values.mean()) for key, values in seconds.items()},
        "under": {exchange: float(time.total.mean()) for exchange, time in comparison.under[name].items()},
        "limit": usual_limit(own).text,
        "best_limit": usual_limit(best_limits).text,
        "energy": _energy(inputs, comparison, name),
        "layers": [
            {"layer_id": layer, "exchange": strategy.placement.exchange[row], "best_exchange": best.exchange[row]}
            | {key: float(values[row]) for key, values in seconds.items()}
            | limits[row]
            | {"best_limit": best_limits[row]._asdict()}
            for row, layer in enumerate(inputs.layer_ids)
        ],
    }


def memory_report(inputs: Inputs, strategy: Strategy) -> dict[str, float | None]:
    """Bytes of expert weights on a node, of the layers of the run, and the least that is left for KV."""
    memory = weights_on_nodes(inputs, strategy.placement)
    return {"weights_mean_B": memory.mean, "weights_most_B": memory.most, "left_B": memory.left}


def _seconds(comparison: Comparison, name: str) -> dict[str, np.ndarray]:
    """Seconds of every layer under its own exchange, and under its best one (`best_`).

    `des_model_total_s` is the model on the batches that `des_total_s` replays, with the simulator's schedule.
    """
    under = {"": comparison.scores[name], "best_": time_under_best(comparison, name)}
    parts = {
        f"{prefix}{stage}_s": getattr(time, stage).mean(axis=1)
        for prefix, time in under.items()
        for stage in ("compute", "dispatch", "combine")
    }
    totals = {f"{prefix}total_s": time.mean for prefix, time in under.items()}
    tails = {f"{prefix}p95_total_s": time.p95 for prefix, time in under.items()}
    simulated = {"des_total_s": comparison.replays[name].time.mean, "des_model_total_s": comparison.replayed[name].mean}
    return parts | totals | tails | simulated


def _energy(inputs: Inputs, comparison: Comparison, name: str) -> dict[str, Any] | None:
    """J of a layer and its batch under the strategy's own exchange; `None` where the machine states no energy.

    `des_model_total_J` is the model on the batches that `des_total_J` replays, with the simulator's schedule.
    """
    score, tokens = comparison.scores[name], inputs.scenario.workload.batch_tokens
    if not score.energy:
        return None
    total, layers = float(score.total_energy.mean()), score.total_energy.mean(axis=1)
    return {
        "total_J": total,
        "per_token_J": total / tokens,
        "by_resource_J": {resource: float(joules.mean()) for resource, joules in score.energy.items()},
        "des_total_J": float(comparison.replays[name].time.total_energy.mean()),
        "des_model_total_J": float(comparison.replayed[name].total_energy.mean()),
        "not_stated": unstated_energy(inputs.scenario.hardware),
        "layers": [
            {"layer_id": layer, "total_J": float(joules)}
            for layer, joules in zip(inputs.layer_ids, layers, strict=True)
        ],
    }


def _limits(inputs: Inputs, comparison: Comparison, name: str, limits: list[LayerLimit]) -> list[dict[str, Any]]:
    """Of every layer the busiest node, the busiest link of either stage, the longest stage and its limit."""
    score, ends = comparison.scores[name], np.asarray(inputs.model.machine.topology.link_ends)
    link = np.maximum(score.dispatch_link_time, score.combine_link_time).argmax(axis=1)
    return [
        {
            "bottleneck_node": int(score.node_time[row].argmax()),
            "bottleneck_link": ends[link[row]].tolist(),
            "bottleneck_stage": limit.stage,
            "limit": limit._asdict(),
        }
        for row, limit in enumerate(limits)
    ]


def _best(comparison: Comparison, row: int, layer: int) -> dict[str, Any]:
    """The fastest strategy of a layer among those that are comparable, each under its best exchange."""
    able = {name: comparison.best(name) for name, strategy in comparison.strategies.items() if strategy.comparable}
    fastest = min(able, key=lambda name: able[name].mean[row], default=None)
    if fastest is None:
        return {"layer_id": layer, "strategy": None, "exchange": None, "total_s": None}
    best = able[fastest]
    return {
        "layer_id": layer,
        "strategy": fastest,
        "exchange": best.exchange[row],
        "total_s": float(best.mean[row]),
    }


def _agreement(comparison: Comparison) -> dict[str, Any]:
    """Model and simulator on all strategies, layers and replayed batches."""
    pairs = [(comparison.replayed[name], replay.time) for name, replay in comparison.replays.items()]
    return {
        what: agreement(
            np.stack([getattr(model, what) for model, _ in pairs]),
            np.stack([getattr(simulated, what) for _, simulated in pairs]),
        )
        for what in ("communication", "total")
    }


def _device() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "cpu_count": os.cpu_count(),
    }


def _gap(comparison: Comparison) -> float | None:
    """How far the tuned plan is above the bound, both on the evaluation batches: 0.1 is 10 %."""
    if comparison.bound is None:
        return None
    return float(comparison.scores[TUNED].mean.mean() / comparison.bound.mean() - 1)


def _history(history: History) -> dict[str, list[int] | list[float]]:
    """The steps of a search, and the time found at each, s, mean over layers."""
    return {"step": list(history.step), "mean_s": [float(np.mean(seconds)) for seconds in history.seconds]}
