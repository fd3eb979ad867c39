"""Tables and pictures of a comparison, for people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.session import OutputFolder, messages
from jaxmoe.config import unstated_energy
from jaxmoe.experiment.comparison import Comparison
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.limits import LayerLimit, layer_limits, usual_limit
from jaxmoe.experiment.strategies import GATHERED, TUNED, Strategy, weights_on_nodes
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
    plot_speedups,
)
from jaxmoe.report.html import MachineLoads, write_loads
from jaxmoe.report.style import energy_unit, time_unit
from jaxmoe.tune import History, TuneResult
from jaxmoe.units import GIGA

# Tables for people, on standard output.

WIDTH = 180  # where there is no terminal to tell


def print_comparison(inputs: Inputs, comparison: Comparison, title: str) -> None:
    """Mean over layers of every strategy, its limit, and energy where the machine states any."""
    factor, unit = time_unit(max(float(score.mean.mean()) for score in comparison.scores.values()))
    table = Table(title=f"{title} [{unit}]".replace("[", r"\["))
    table.add_column("strategy", no_wrap=True)
    table.add_column("exchange")
    for column in ("dispatch", "compute", "combine", "total", "p95", "simulated\n(model there)"):
        table.add_column(column, justify="right")
    table.add_column("best exchange")
    table.add_column("total under\nthe best", justify="right")
    table.add_column("limited by")
    energy, limits = _energy_per_token(comparison, inputs.scenario.workload.batch_tokens), _limits(inputs, comparison)
    if energy:
        joules, energy_name = energy_unit(max(energy.values()))
        table.add_column(f"energy of a token\n{energy_name}", justify="right")
    tuned = TUNED in comparison.scores
    if tuned:
        table.add_column("tuned faster by\nmean (least)", justify="right")
    for name in comparison.strategies:
        own = exchange_names(comparison.strategies[name].placement.exchange)
        row = [f"{seconds * factor:.4g}" for seconds in _means(comparison, name)]
        simulated, best = _simulated(comparison, name, factor), _best(comparison, name, factor)
        spent = [f"{energy[name] * joules:.4g}"] if energy else []
        gain = [_gain(comparison, name)] if tuned else []
        table.add_row(_marked(comparison, name), own, *row, simulated, *best, limits[name].text, *spent, *gain)
    print_table(table)
    if any(each.comparable for each in comparison.strategies.values()):
        Console(width=WIDTH, highlight=False).print(escape(_fastest(inputs, comparison, limits)), soft_wrap=True)
    print_memory(inputs, [*comparison.strategies.values()])


def print_memory(inputs: Inputs, strategies: Sequence[Strategy]) -> None:
    """Weights on a node and what they leave, where a strategy has copies: these buy time with bytes."""
    if not any(strategy.placement.copies for strategy in strategies):
        return
    table = Table(title=escape(f"memory of a node for experts, {len(inputs.layer_ids)} layers [GB]"))
    table.add_column("strategy", no_wrap=True)
    for column in ("weights, mean", "fullest node", "least left for KV"):
        table.add_column(column, justify="right")
    for strategy in strategies:
        memory = weights_on_nodes(inputs, strategy.placement)
        left = "not stated" if memory.left is None else f"{memory.left / GIGA:.4g}"
        table.add_row(escape(strategy.name), f"{memory.mean / GIGA:.4g}", f"{memory.most / GIGA:.4g}", left)
    print_table(table)


def _limits(inputs: Inputs, comparison: Comparison) -> dict[str, LayerLimit]:
    """The limit of most layers of every strategy under its own exchange."""
    topology = inputs.model.machine.topology
    return {name: usual_limit(layer_limits(score, topology)) for name, score in comparison.scores.items()}


def _fastest(inputs: Inputs, comparison: Comparison, limits: Mapping[str, LayerLimit]) -> str:
    """The answer in a sentence: what is fastest, what it waits for, and how much less there could be."""
    named = {name: comparison.best(name) for name, each in comparison.strategies.items() if each.comparable}
    name, best = min(named.items(), key=lambda item: item[1].mean.mean())
    factor, unit = time_unit(float(best.mean.mean()))
    *stages, total = _means(comparison, name)[:4]
    stage, most = max(zip(("dispatch", "compute", "combine"), stages, strict=True), key=lambda item: item[1])
    told = f"fastest: {name} under {', '.join(exchange_names(best.exchange).splitlines())}, "
    told += f"{best.mean.mean() * factor:.4g} {unit} a layer; under its own exchange {stage} takes "
    told += f"{100 * most / total:.0f} % of the time; {limits[name].resource} limits {limits[name].stage}"
    if comparison.bound is None:
        return told + _why_unbounded(inputs)
    return f"{told}; tuning cannot find less than {comparison.bound.mean() * factor:.4g} {unit}"


def _why_unbounded(inputs: Inputs) -> str:
    gemm = inputs.model.machine.die.gemm
    if gemm is None or gemm.within_rate:
        return ""
    return f"; nothing bounds what tuning finds, as {type(gemm).__name__} does not state within_rate = True"


def print_topics(means: Mapping[str, Mapping[str, float]]) -> None:
    """Mean time of every strategy by topic, over all topics, and of its worst one."""
    factor, unit = time_unit(max(max(each.values()) for each in means.values()))
    table = Table(title=escape(f"each topic, under the best exchange of the table above [{unit}]"))
    for column in ("strategy", *next(iter(means.values())), "mean", "worst"):
        table.add_column(escape(column), justify="left" if column == "strategy" else "right")
    for name, each in means.items():
        seconds = [*each.values()]
        row = [*seconds, sum(seconds) / len(seconds), max(seconds)]
        table.add_row(escape(name), *(f"{value * factor:.4g}" for value in row))
    print_table(table)


def _energy_per_token(comparison: Comparison, batch_tokens: int) -> dict[str, float]:
    """J of a layer for each token, by strategy under its own exchange; empty where the machine states no energy."""
    return {
        name: float(score.total_energy.mean()) / batch_tokens
        for name, score in comparison.scores.items()
        if score.energy
    }


def exchange_names(names: Sequence[str]) -> str:
    """The exchange of all layers, or each with the number of layers that it has, the most used first."""
    counted = Counter(names).most_common()
    return "\n".join(name if len(counted) == 1 else f"{name} in {count}" for name, count in counted)


def print_warnings(lines: Iterable[str]) -> None:
    """Print every warning as a line of its own on the message stream, apart from the results."""
    for line in lines:
        messages().print(f"[yellow]note:[/] {escape(line)}")


def comparison_warnings(comparison: Comparison, inputs: Inputs) -> list[str]:
    """Notes on strategies and on energy, and every strategy that is faster than the tuned plan somewhere."""
    notes = [f"{name}: {strategy.note}" for name, strategy in comparison.strategies.items() if strategy.note]
    notes += _knowing(comparison, inputs)
    unstated = unstated_energy(inputs.scenario.hardware)
    if unstated and any(score.energy for score in comparison.scores.values()):
        notes.append(f"energy counts nothing for what the machine does not state: {', '.join(unstated)}")
    if TUNED in comparison.scores:
        for name in comparison.scores:
            ahead = comparison.speedup(name) < 1
            if ahead.any():
                notes.append(
                    f"{name} is faster than {TUNED} on {ahead.sum()} of {ahead.size} layers, each under its best "
                    "exchange"
                )
    return notes


def _knowing(comparison: Comparison, inputs: Inputs) -> list[str]:
    """What the tuned plan's exchanges have to know at run time, where that is not charged."""
    if TUNED not in comparison.strategies or inputs.model.costs.deciding is not None:
        return []
    used = dict.fromkeys(comparison.strategies[TUNED].placement.exchange)
    knowing = [name for name in used if inputs.exchange(name).knows == "batch"]
    if not knowing:
        return []
    return [
        f"{TUNED}: under {' and '.join(knowing)} a token knows what those before it in the batch chose, here for free; "
        "costs.deciding charges for it, tuning.exchanges can leave it out"
    ]


def _means(comparison: Comparison, name: str) -> list[float]:
    score = comparison.scores[name]
    return [float(np.mean(part)) for part in (score.dispatch, score.compute, score.combine, score.total)] + [
        float(score.p95.mean())
    ]


def _simulated(comparison: Comparison, name: str, factor: float) -> str:
    """The simulator's mean, and the model's on the same batches: they are fewer than those of other columns."""
    simulated, model = comparison.replays[name].time.total.mean(), comparison.replayed[name].total.mean()
    return f"{simulated * factor:.4g} ({model * factor:.4g})"


def _best(comparison: Comparison, name: str, factor: float) -> tuple[str, str]:
    """The best exchange of a strategy, and its mean time under it; none where it is not comparable."""
    if not comparison.strategies[name].comparable:
        return "-", "-"
    best = comparison.best(name)
    return exchange_names(best.exchange), f"{best.mean.mean() * factor:.4g}"


def _marked(comparison: Comparison, name: str) -> str:
    """The name, and whether its plan is illegal."""
    return escape(name) + ("" if comparison.strategies[name].fits else " (does not fit)")


def _gain(comparison: Comparison, name: str) -> str:
    if name == TUNED:
        return ""
    ratio = comparison.speedup(name)
    return f"{ratio.mean():.2f} ({ratio.min():.2f})"


def new_table(title: str, name: str, numbers: Iterable[str], caption: str | None = None) -> Table:
    """A table whose first column has names, never broken, and whose other columns have numbers."""
    table = Table(title=escape(title), caption=caption)
    table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def print_table(table: Table) -> None:
    """Show a table, as wide as it needs where no terminal limits it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # Redirected output would be squeezed into 80 columns.
        console = Console(highlight=False, width=WIDTH)
    console.print(table)


# The figures of a run, drawn from a comparison.


def draw_comparison(folder: OutputFolder, inputs: Inputs, comparison: Comparison) -> None:
    """Figures of `evaluate`, which `tune` draws as well, and the loads that are in them."""
    scenario = inputs.scenario.name
    latency = {name: score.mean for name, score in comparison.scores.items()}
    plot_layer_latency(folder.target("latency_by_layer.png"), inputs.layer_ids, latency, f"{scenario}: time of a layer")
    stages = {name: (score.dispatch, score.compute, score.combine) for name, score in comparison.scores.items()}
    limits = {name: each.text for name, each in _limits(inputs, comparison).items()}
    plot_breakdown(folder.target("breakdown.png"), stages, f"{scenario}: stages of a layer and their limit", limits)
    if inputs.shape is not None:
        _draw_mesh_loads(folder, inputs, inputs.shape, comparison)
    simulated = {name: replay.time.communication for name, replay in comparison.replays.items()}
    model = {name: comparison.replayed[name].communication for name in simulated}
    draw_scatter(folder, f"{scenario}: dispatch and combine", model, simulated)
    _write_loads(folder, inputs, comparison)


def _write_loads(folder: OutputFolder, inputs: Inputs, comparison: Comparison) -> None:
    """`loads.npz`: busy seconds of every node and link by strategy and layer, under the strategy's own exchange."""
    topology, scores = inputs.model.machine.topology, comparison.scores
    loads = MachineLoads(
        names=list(scores),
        frames=[f"layer {layer}" for layer in inputs.layer_ids],
        node=np.stack([score.node_time for score in scores.values()]),
        link=np.stack([score.link_time for score in scores.values()]),
        link_ends=np.asarray(topology.link_ends),
        positions=np.asarray(topology.positions()),
        unit="s",
    )
    write_loads(folder.target("loads.npz"), loads)


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


def _draw_mesh_loads(folder: OutputFolder, inputs: Inputs, shape: tuple[int, int], comparison: Comparison) -> None:
    """Two plans in the layer in which they differ most, with the gathering plan between them if it differs."""
    before, after = _before_and_after(comparison)
    gain = comparison.scores[before].mean - comparison.scores[after].mean
    row = int(np.abs(gain).argmax())
    order = mesh_link_order(shape, inputs.model.machine.topology.link_ends)
    panels = [
        MeshPanel(name, comparison.scores[name].node_time[row], comparison.scores[name].link_time[row, order])
        for name in (before, GATHERED, after)
        if name in comparison.scores
    ]
    title = f"{inputs.scenario.name}: loads in layer {inputs.layer_ids[row]}, where {before} and {after} differ most"
    plot_mesh_loads(folder.target("mesh_loads.png"), shape, panels, title)


def _before_and_after(comparison: Comparison) -> tuple[str, str]:
    """Tuned after the first given plan, else after balanced EP; without tuning, a given plan, else hybrid, after it."""
    given = [name for name in comparison.scores if name not in {*compared_strategies(), GATHERED, TUNED}]
    if TUNED in comparison.scores:
        return (given or ["ep_balanced"])[0], TUNED
    return "ep_balanced", (given or ["hybrid"])[0]


def _mean_history(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and seconds as the mean over layers."""
    return np.asarray(history.step), np.stack(history.seconds).mean(axis=1)
