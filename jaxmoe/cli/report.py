"""The part of `summary.json` that compares strategies. All times are seconds."""

from typing import Any

import numpy as np

from jaxmoe.cli.agreement import agreement
from jaxmoe.cli.comparison import OTHER_GATHER, Comparison
from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.whole_model import whole_model_report
from jaxmoe.hardware.mesh import link_ends


def comparison_report(inputs: Inputs, comparison: Comparison) -> dict[str, Any]:
    """Every strategy by layer and on average, which is best where, and how the simulator agrees."""
    other = OTHER_GATHER[inputs.scenario.costs.gather][0]
    return {
        "strategies": {name: _strategy(inputs, comparison, name) for name in comparison.strategies},
        "totals": {name: float(score.layer_total.sum()) for name, score in comparison.scores.items()},
        "best": [_best(comparison, row, layer) for row, layer in enumerate(inputs.layer_ids)],
        f"gather_{other}": {name: float(s.layer_total.mean()) for name, s in comparison.other_gather.items()},
        "bound_s": None if comparison.bound is None else per_layer(comparison.bound),
        "agreement": _agreement(comparison),
        "whole_model": whole_model_report(inputs, comparison),
    }


def per_layer(seconds: np.ndarray) -> dict[str, Any]:
    """Seconds of every layer, and their mean."""
    return {"mean": float(seconds.mean()), "layers": seconds.astype(float).tolist()}


def _strategy(inputs: Inputs, comparison: Comparison, name: str) -> dict[str, Any]:
    strategy = comparison.strategies[name]
    seconds = _seconds(comparison, name)
    limits = _limits(inputs, comparison, name)
    return {
        "fits": strategy.fits,
        "comparable": strategy.comparable,
        "note": strategy.note,
        "mode": strategy.placement.mode,
        "mean": {key: float(values.mean()) for key, values in seconds.items()},
        "layers": [
            {"layer_id": layer} | {key: float(values[row]) for key, values in seconds.items()} | limits[row]
            for row, layer in enumerate(inputs.layer_ids)
        ],
    }


def _seconds(comparison: Comparison, name: str) -> dict[str, np.ndarray]:
    """Seconds of every layer. `des_model_total_s` is the model on the batches that `des_total_s` replays."""
    score = comparison.scores[name]
    return {
        "compute_s": score.compute.mean(axis=1),
        "dispatch_s": score.dispatch.mean(axis=1),
        "combine_s": score.combine.mean(axis=1),
        "total_s": score.layer_total,
        "p95_total_s": score.p95_total,
        "des_total_s": comparison.replays[name].total.mean(axis=1),
        "des_model_total_s": comparison.replayed(name).layer_total,
    }


def _limits(inputs: Inputs, comparison: Comparison, name: str) -> list[dict[str, Any]]:
    """What limits every layer: the busiest node, the busiest link of either stage, the longest stage."""
    score, ends = comparison.scores[name], link_ends(inputs.shape)
    link = np.maximum(score.dispatch_link_time, score.combine_link_time).argmax(axis=1)
    stages = ("dispatch", "compute", "combine")
    longest = np.stack([getattr(score, stage).mean(axis=1) for stage in stages]).argmax(axis=0)
    return [
        {
            "bottleneck_node": int(score.node_time[row].argmax()),
            "bottleneck_link": ends[link[row]].tolist(),
            "bottleneck_stage": stages[longest[row]],
        }
        for row in range(len(inputs.layer_ids))
    ]


def _best(comparison: Comparison, row: int, layer: int) -> dict[str, Any]:
    """The fastest strategy of a layer among those that fit and leave nothing out."""
    able = [name for name, strategy in comparison.strategies.items() if strategy.fits and strategy.comparable]
    times = {name: float(comparison.scores[name].layer_total[row]) for name in able}
    fastest = min(times, key=times.__getitem__, default=None)
    return {"layer_id": layer, "strategy": fastest, "total_s": None if fastest is None else times[fastest]}


def _agreement(comparison: Comparison) -> dict[str, Any]:
    """Model and simulator on all strategies, layers and replayed batches."""
    pairs = [(comparison.replayed(name), replay) for name, replay in comparison.replays.items()]
    return {
        what: agreement(
            np.stack([getattr(score, what) for score, _ in pairs]),
            np.stack([getattr(replay, what) for _, replay in pairs]),
        )
        for what in ("communication", "total")
    }
