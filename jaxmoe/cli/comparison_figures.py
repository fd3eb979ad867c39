"""Pictures of a comparison, and the loads that are in them."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxmoe.cli.session import OutputFolder
from jaxmoe.engine import LayerTime
from jaxmoe.experiment.comparison import Comparison, time_under_best
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.limits import layer_limits, usual_limit
from jaxmoe.experiment.strategies import GATHERED, TUNED
from jaxmoe.experiment.validation import Figures, agreement
from jaxmoe.hardware.networks import mesh_link_order
from jaxmoe.placement.named import compared_strategies
from jaxmoe.report import (
    MeshPanel,
    plot_breakdown,
    plot_convergence,
    plot_layer_latency,
    plot_mesh_loads,
    plot_model_vs_simulation,
    plot_network,
    plot_speedups,
)
from jaxmoe.report.html import MachineLoads, write_loads
from jaxmoe.report.style import LINK_TIME, NODE_TIME
from jaxmoe.tune import History, TuneResult

LOADS = "loads.npz"


def draw_comparison(folder: OutputFolder, inputs: Inputs, comparison: Comparison) -> None:
    """Figures of `evaluate`, which `tune` draws as well, and the loads that are in them."""
    scenario = inputs.scenario.name
    best = {name: time_under_best(comparison, name) for name in comparison.strategies}
    latency = {name: time.mean for name, time in best.items()}
    title = f"{scenario}: time of a layer under its best exchange"
    plot_layer_latency(folder.target("latency_by_layer.png"), inputs.layer_ids, latency, title)
    stages = {name: (time.dispatch, time.compute, time.combine) for name, time in best.items()}
    topology = inputs.model.machine.topology
    limits = {name: usual_limit(layer_limits(time, topology)).text for name, time in best.items()}
    title = f"{scenario}: stages of a layer under its best exchange, and their limit"
    plot_breakdown(folder.target("breakdown.png"), stages, title, limits)
    if inputs.shape is not None:
        _draw_mesh_loads(folder, inputs, inputs.shape, best)
    else:
        _draw_network_loads(folder, inputs, best, comparison.fastest or next(iter(best)))
    simulated = {name: replay.time.communication for name, replay in comparison.replays.items()}
    model = {name: comparison.replayed[name].communication for name in simulated}
    draw_scatter(folder, f"{scenario}: dispatch and combine", model, simulated)
    _write_loads(folder, inputs, best)


def _write_loads(folder: OutputFolder, inputs: Inputs, best: Mapping[str, LayerTime]) -> None:
    """`loads.npz`: busy seconds of every node and link by strategy and layer, under the best exchange."""
    topology = inputs.model.machine.topology
    loads = MachineLoads(
        names=list(best),
        frames=[f"layer {layer}" for layer in inputs.layer_ids],
        node=np.stack([time.node_time for time in best.values()]),
        link=np.stack([time.link_time for time in best.values()]),
        link_ends=np.asarray(topology.link_ends),
        positions=np.asarray(topology.positions()),
        unit="s",
        grid=topology.grid or (),
    )
    write_loads(folder.target(LOADS), loads)


def draw_tuning(folder: OutputFolder, inputs: Inputs, comparison: Comparison, result: TuneResult) -> None:
    """Figures of `tune` alone."""
    others = {name: comparison.speedup(name) for name in comparison.scores if name != TUNED}
    title = f"{inputs.scenario.name}: speed-up of the tuned plan"
    plot_speedups(folder.target("speedups.png"), inputs.layer_ids, others, title)
    history = {stage: _mean_history(history) for stage, history in result.history.items() if history.step}
    if history:
        plot_convergence(
            folder.target("convergence.png"),
            history,
            stages={name: float(s.mean()) for name, s in result.stages.items() if name != "relaxed"},
            bound=float(result.bound.mean()),
            title=f"{inputs.scenario.name}: tuning, mean over {len(inputs.layer_ids)} layers",
        )


def draw_scatter(
    folder: OutputFolder, title: str, model: Mapping[str, np.ndarray], simulated: Mapping[str, np.ndarray]
) -> None:
    """Predicted over simulated seconds, coloured by key. Points without any time have no place on the axes."""
    seen = np.concatenate([np.ravel(seconds) for seconds in simulated.values()])
    told = np.concatenate([np.ravel(seconds) for seconds in model.values()])
    group = np.repeat(list(simulated), [seconds.size for seconds in simulated.values()])
    shown = (seen > 0) & (told > 0)
    if shown.any():
        plot_model_vs_simulation(
            folder.target("model_vs_simulation.png"),
            seen[shown],
            told[shown],
            group[shown].tolist(),
            title,
            _agreement_text(agreement(told, seen)),
        )


def _agreement_text(figures: Figures) -> str:
    """Both figures for people."""
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return ", ".join(
        ["R2 without meaning" if r2 is None else f"R2 = {r2:.6f}"]
        + ([] if error is None else [f"mean absolute error {error:.2f} %"])
    )


def _draw_mesh_loads(
    folder: OutputFolder, inputs: Inputs, shape: tuple[int, int], best: Mapping[str, LayerTime]
) -> None:
    """Two plans in the layer in which they differ most, with the gathering plan between them if it differs."""
    before, after = _before_and_after([*best])
    gain = best[before].mean - best[after].mean
    row = int(np.abs(gain).argmax())
    order = mesh_link_order(shape, inputs.model.machine.topology.link_ends)
    panels = [
        MeshPanel(name, best[name].node_time[row], best[name].link_time[row, order])
        for name in (before, GATHERED, after)
        if name in best
    ]
    where = f"layer {inputs.layer_ids[row]}, where {before} and {after} differ most"
    title = f"{inputs.scenario.name}: loads under best exchanges in {where}"
    plot_mesh_loads(folder.target("mesh_loads.png"), shape, panels, title)


def _draw_network_loads(folder: OutputFolder, inputs: Inputs, best: Mapping[str, LayerTime], name: str) -> None:
    """Loads on a network that is no mesh, under the best exchange of strategy `name`, in its slowest layer."""
    time, topology = best[name], inputs.model.machine.topology
    row = int(time.mean.argmax())
    plot_network(
        folder.target("network_loads.png"),
        np.asarray(topology.link_ends),
        np.asarray(topology.positions()),
        time.link_time[row],
        time.node_time[row],
        title=f"{inputs.scenario.name}: loads in layer {inputs.layer_ids[row]}, {name} under its best exchange",
        num_nodes=topology.num_nodes,
        measures=(NODE_TIME, LINK_TIME),
    )


def _before_and_after(names: Sequence[str]) -> tuple[str, str]:
    """Tuned after the first given plan, else after balanced EP; without tuning, a given plan, else hybrid, after it."""
    given = [name for name in names if name not in {*compared_strategies(), GATHERED, TUNED}]
    if TUNED in names:
        return (given or ["ep_balanced"])[0], TUNED
    return "ep_balanced", (given or ["hybrid"])[0]


def _mean_history(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and seconds as the mean over layers."""
    return np.asarray(history.step), np.stack(history.seconds).mean(axis=1)
