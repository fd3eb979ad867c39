"""Tables of a comparison, for people, and what all printed tables share."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.kept_output import keep
from jaxmoe.cli.progress import messages
from jaxmoe.config import Scenario, element_bytes, unstated_energy
from jaxmoe.config.dies import FittedGemmConfig
from jaxmoe.experiment.comparison import BestExchange, Comparison
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.limits import LayerLimit, layer_limit, layer_limits, usual_limit
from jaxmoe.experiment.strategies import TUNED, Strategy, weights_on_nodes
from jaxmoe.experiment.whole_model import Step, WholeModel
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.report.style import aligned, energy_unit, time_unit
from jaxmoe.units import GIGA

# Tables for people, on standard output.

WIDTH = 180  # where there is no terminal to tell
NONE = "-"
MISFIT = " *"  # behind the name of a strategy
ALIKE = 0.1  # bytes of a weight: relative difference without a note


def print_comparison(inputs: Inputs, comparison: Comparison, title: str, wide: bool = False) -> None:
    """Every strategy under its best exchange, what limits it, and a step of the whole model; `wide`, all the rest."""
    best = {name: comparison.best(name) for name, each in comparison.strategies.items() if each.comparable}
    limits = _limits(inputs, best)
    _print_best(comparison, best, limits, title)
    if wide:
        _print_own(comparison)
        _print_checked(inputs, comparison)
    model = WholeModel.of(inputs)
    print_steps(model, {name: model.step(float(each.mean.mean())) for name, each in best.items()})
    print_memory(inputs, [*comparison.strategies.values()])
    told = ""
    if name := comparison.fastest:
        told = _fastest(inputs, name, best[name], limits[name], comparison.bound)
    elif not any(each.fits for each in comparison.strategies.values()):
        told = "none of these fits the memory; jaxmoe tune looks for a plan that does"
    if told:
        Console(width=WIDTH, highlight=False, emoji=False).print(escape(told), soft_wrap=True)


def _limits(inputs: Inputs, best: Mapping[str, BestExchange]) -> dict[str, LayerLimit]:
    """The limit of most layers of every strategy under its best exchange."""
    topology = inputs.model.machine.topology
    return {name: usual_limit(layer_limit(time, topology) for time in each.times) for name, each in best.items()}


def _print_best(
    comparison: Comparison, best: Mapping[str, BestExchange], limits: Mapping[str, LayerLimit], title: str
) -> None:
    """A layer of every strategy, mean over layers; a strategy that is not comparable is named without figures."""
    factor, unit = time_unit(max((float(each.mean.mean()) for each in best.values()), default=0.0))
    named = [*comparison.strategies]
    reference = comparison.reference
    misfits = [name for name in named if not comparison.strategies[name].fits]
    told = "under the best exchange of every layer" + (f"; {MISFIT.strip()} does not fit the memory" if misfits else "")
    columns = ["strategy", f"total\n{unit}", f"against\n{TUNED if reference == TUNED else 'fastest'}"]
    table = new_table(title, columns[0], columns[1:], told)
    table.add_column("best exchange", overflow="fold")
    table.add_column("limit", overflow="fold")
    times = aligned(best[name].mean.mean() * factor if name in best else None for name in named)
    ratios = [
        float(comparison.speedup(name, reference).mean()) if name in best and reference else None for name in named
    ]
    for name, time, ratio in zip(named, times, map(as_factor, ratios), strict=True):
        exchange, limit = (exchange_names(best[name].exchange), limits[name].name) if name in best else (NONE, NONE)
        table.add_row(escape(name) + MISFIT * (name in misfits), time, ratio, escape(exchange), escape(limit))
    print_table(table)


def _print_own(comparison: Comparison) -> None:
    """The stages of every strategy under its own exchange."""
    means = {name: _means(comparison, name) for name in comparison.strategies}
    factor, unit = time_unit(max(max(each) for each in means.values()))
    title = f"under each strategy's own exchange [{unit}]"
    table = new_table(title, "strategy", ("dispatch", "compute", "combine", "total", "p95"))
    table.add_column("exchange", overflow="fold")
    columns = [aligned(seconds * factor for seconds in column) for column in zip(*means.values(), strict=True)]
    for name, row in zip(means, zip(*columns, strict=True), strict=True):
        table.add_row(escape(name), *row, escape(exchange_names(comparison.strategies[name].placement.exchange)))
    print_table(table)


def _print_checked(inputs: Inputs, comparison: Comparison) -> None:
    """Beside every strategy under its own exchange: its limit, the simulator, energy, and the least gain over it."""
    topology = inputs.model.machine.topology
    simulated = {name: float(replay.time.total.mean()) for name, replay in comparison.replays.items()}
    there = {name: float(comparison.replayed[name].total.mean()) for name in simulated}
    factor, unit = time_unit(max((*simulated.values(), *there.values())))
    columns = {
        f"simulated\n{unit}": aligned(seconds * factor for seconds in simulated.values()),
        f"model there\n{unit}": aligned(seconds * factor for seconds in there.values()),
    }
    energy = _energy_per_token(comparison, inputs.scenario.workload.batch_tokens)
    if energy:
        joules, energy_name = energy_unit(max(energy.values()))
        columns[f"energy of a token\n{energy_name}"] = aligned(value * joules for value in energy.values())
    if TUNED in comparison.scores:
        least = [float(comparison.speedup(name).min()) for name in simulated]
        columns[f"least against {TUNED}\n(best exchanges)"] = [as_factor(value) for value in least]
    title = "under each strategy's own exchange: the event simulator, and the model on the batches that it replays"
    table = new_table(title, "strategy", columns)
    table.add_column("limit", overflow="fold")
    for name, row in zip(simulated, zip(*columns.values(), strict=True), strict=True):
        limit = usual_limit(layer_limits(comparison.scores[name], topology)).text
        table.add_row(escape(name), *row, escape(limit))
    print_table(table)


def print_steps(model: WholeModel, steps: Mapping[str, Step]) -> None:
    """A step of the whole model by strategy or system, with what is counted in it."""
    if not steps:
        return
    factor, unit = time_unit(max(step.seconds for step in steps.values()))
    whole = "MoE layers of a step" if model.missing else "whole model"
    title = f"{whole}: {model.tokens} tokens on {model.devices} devices, each the next one of its request"
    table = new_table(title, "", (f"a token\n{unit}", "tokens/s", "tokens/s\na device"), model.counted)
    columns = [
        aligned(step.seconds * factor for step in steps.values()),
        aligned(step.tokens_per_s for step in steps.values()),
        aligned(step.tokens_per_s_device for step in steps.values()),
    ]
    for name, row in zip(steps, zip(*columns, strict=True), strict=True):
        table.add_row(escape(name), *row)
    print_table(table)


def print_memory(inputs: Inputs, strategies: Sequence[Strategy]) -> None:
    """Weights on a node and what they leave, where a strategy has copies: these buy time with bytes."""
    if not any(strategy.placement.copies for strategy in strategies):
        return
    table = Table(title=escape(f"memory of a node for experts, {len(inputs.layer_ids)} layers [GB]"))
    table.add_column("strategy", no_wrap=True)
    for column in ("weights, mean", "fullest node", "least left for KV\n(- not stated)"):
        table.add_column(column, justify="right")
    memories = [weights_on_nodes(inputs, strategy.placement) for strategy in strategies]
    columns = [
        aligned(None if value is None else value / GIGA for value in each) for each in zip(*memories, strict=True)
    ]
    for strategy, row in zip(strategies, zip(*columns, strict=True), strict=True):
        table.add_row(escape(strategy.name), *row)
    print_table(table)


def print_front(copies: int, front: Sequence[Mapping[str, Any]]) -> None:
    """Bytes against time by the number of copies of every expert, where there is a choice; the plan has `copies`."""
    if len(front) == 1:
        return
    factor, unit = time_unit(max(each["time_s"] or 0.0 for each in front))
    told = f"on the tuner's batches; {NONE} where the bound is not below the time of fewer copies; tuned has {copies}"
    headings = ("weights of a\nnode, mean GB", f"best plan\n{unit}", f"its bound\n{unit}")
    table = new_table("bytes against time", "copies of an expert", headings, told)
    columns = [
        aligned(None if value is None else value * scale for value in (each[key] for each in front))
        for key, scale in (("weights_mean_B", 1 / GIGA), ("time_s", factor), ("bound_s", factor))
    ]
    for each, row in zip(front, zip(*columns, strict=True), strict=True):
        table.add_row(str(each["copies"]), *row)
    print_table(table)


def _fastest(inputs: Inputs, name: str, best: BestExchange, limit: LayerLimit, bound: np.ndarray | None) -> str:
    """The answer in a sentence: what is fastest, what it waits for, and how much less there could be."""
    factor, unit = time_unit(float(best.mean.mean()))
    told = f"fastest: {name} under {', '.join(exchange_names(best.exchange).splitlines())}, "
    told += f"{aligned([float(best.mean.mean()) * factor])[0]} {unit} a layer, "
    told += f"limited by {limit.text}, which takes {100 * limit.part:.0f} % of the time"
    told += f", most often at {limit.where}" if limit.where else ""
    if bound is None:
        return told + _why_unbounded(inputs)
    return f"{told}; tuning cannot find less than {aligned([float(bound.mean()) * factor])[0]} {unit}"


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
    rows = [[*each.values(), sum(each.values()) / len(each), max(each.values())] for each in means.values()]
    columns = [aligned(value * factor for value in column) for column in zip(*rows, strict=True)]
    for name, row in zip(means, zip(*columns, strict=True), strict=True):
        table.add_row(escape(name), *row)
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
    notes += kernel_bytes_notes(inputs.scenario) + _knowing(comparison, inputs)
    if (system := inputs.scenario.system.name) != "static":
        notes.append(
            f"system.name {system} counts nothing here, where placements stay as they are; use jaxmoe simulate"
        )
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


def kernel_bytes_notes(scenario: Scenario) -> list[str]:
    """A note where the kernel that times experts was measured with other bytes than the model has."""
    gemm = None if scenario.hardware.die is None else scenario.hardware.die.gemm
    if not isinstance(gemm, FittedGemmConfig) or gemm.precision not in WEIGHT_BYTES:
        return []
    measured, own = WEIGHT_BYTES[gemm.precision], float(element_bytes(scenario).experts)
    if abs(own / measured - 1) < ALIKE:
        return []
    return [
        f"die.gemm times experts in {gemm.precision}, of {measured:.3g} bytes a weight, but the model's have "
        f"{own:.3g}; name their precision at hardware.die.gemm.precision, or their bytes at model.bytes.experts"
    ]


def _knowing(comparison: Comparison, inputs: Inputs) -> list[str]:
    """Names what the tuned plan's exchanges have to know at run time, where that is not charged."""
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


def as_factor(ratio: float | None) -> str:
    """A ratio for people, so that it is not taken for a part or for per cents."""
    return NONE if ratio is None else f"{ratio:.2f}x"


def new_table(title: str, name: str, numbers: Iterable[str], caption: str | None = None) -> Table:
    """A table whose first column has names, never broken, and whose other columns have numbers."""
    table = Table(title=escape(title), caption=None if caption is None else escape(caption), caption_justify="left")
    table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def print_table(table: Table) -> None:
    """Show a table, as wide as it needs where no terminal limits it; no cell is cut off where one does."""
    keep(table)
    for column in table.columns:
        column.overflow = "fold"
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        # Redirected output would be squeezed into 80 columns.
        console = Console(highlight=False, emoji=False, width=WIDTH)
    console.print(table)
