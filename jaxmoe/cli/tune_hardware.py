"""`jaxmoe tune --hardware`: the best parameters of a machine under constraints, and shadow prices of its limits."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import Scenario, element_bytes, resolved
from jaxmoe.config.hardware_space import SYSTEM, read_space
from jaxmoe.config.loader import override_values
from jaxmoe.engine import LayerTime
from jaxmoe.experiment.codesign.discrete import TriedChoice, tune_space
from jaxmoe.experiment.codesign.search import HardwareResult
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import per_layer, surroundings
from jaxmoe.files import atomic_write
from jaxmoe.placement import write_plan
from jaxmoe.placement.named import compared_strategies
from jaxmoe.registry import METRICS
from jaxmoe.report import plot_starts
from jaxmoe.report.style import time_unit
from jaxmoe.tune.machine.augmented_lagrangian import MET
from jaxmoe.tune.machine.trust_region import PricedConstraint

SCENARIO, PLAN, GATE = "scenario.yaml", "plan.npz", "gate.npz"


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    space: Path,
    trace: Path | None,
    overrides: list[str] | None,
    layers: str | None,
    refused: Mapping[str, Any],
) -> None:
    """Descend over the space, and write the best machine as a scenario of its own, with its plan where that is tuned.

    Ctrl-C gives up: a machine that is half found is none.
    """
    for option, given in refused.items():
        if given:
            raise OptionError(f"{option} does not go with --hardware; leave one of the two out")
    with StageTimer() as clock:
        with clock.stage("load"):
            fixed = override_values(overrides or ())
            if trace is not None:
                fixed["workload.trace"] = {"kind": "file", "path": str(trace.absolute())}
            file = read_space(space)
            for name in (SCENARIO, PLAN):
                folder.check(name)  # before hours of search
        with progress_bars(interrupts.check) as report:
            result, tried = tune_space(file, config.absolute(), fixed, _layers(layers), report, clock)
        files = _write(folder, result)
        with clock.stage("draw"):
            _draw(folder, result)
        command = _command(folder, result, files, layers)
        folder.write_json("summary.json", _summary(result, tried, command) | {"wall_s": clock.report()})
        _print(result, tried, command)


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--layers is {text!r}, expected layer numbers such as 0,8,16") from None


def _write(folder: OutputFolder, result: HardwareResult) -> list[str]:
    """The best machine as a scenario, the plan that runs there where it is no usual strategy, and the gate's bias."""
    with atomic_write(folder.target(SCENARIO)) as aside:
        text = yaml.safe_dump(resolved(result.best.scenarios[0]), sort_keys=False)
        aside.write_text(text, encoding="utf-8")
    strategy, table = result.best.strategy, result.best.table
    if table is not None:
        with atomic_write(folder.target(GATE)) as aside, aside.open("wb") as file:
            np.savez(file, bias=table, layer_ids=strategy.placement.layer_ids)
    if strategy.name in compared_strategies() or result.problem.space.placement == SYSTEM:
        return [SCENARIO]
    strategy.placement.meta.update(scenario=result.best.scenarios[0].name, version=version("jaxmoe"))
    write_plan(folder.target(PLAN), strategy.placement)
    return [SCENARIO, PLAN]


def _command(folder: OutputFolder, result: HardwareResult, files: list[str], layers: str | None) -> str:
    """Command line that evaluates the best machine again, from the files of this run."""
    plan = f" --plan {result.best.strategy.name}={folder.path / PLAN}" if PLAN in files else ""
    chosen = f" --layers {layers}" if layers else ""
    if result.problem.space.placement == SYSTEM:
        return f"jaxmoe simulate {folder.path / SCENARIO}{chosen} --out {folder.path / 'simulated'}"
    return f"jaxmoe evaluate {folder.path / SCENARIO}{plan}{chosen} --out {folder.path / 'evaluated'}"


def _draw(folder: OutputFolder, result: HardwareResult) -> None:
    history = result.history.get("descend with placement", result.history["descend"])
    metric = METRICS[result.problem.space.objective].column
    plot_starts(
        folder.target("starts.png"), history, result.best.metric, metric, f"{len(history[0])} starts of {_name(result)}"
    )


def _name(result: HardwareResult) -> str:
    return f"{result.problem.space.name} on {result.best.scenarios[0].name}"


# For programs.


def _summary(result: HardwareResult, tried: list[TriedChoice], command: str) -> dict[str, Any]:
    """Times are seconds; constraints have the units of their expressions."""
    problem, best = result.problem, result.best
    column = METRICS[problem.space.objective].column
    return {
        "command": "tune --hardware",
        "space": problem.space.model_dump(mode="json", by_alias=True),
        "scenario": resolved(best.scenarios[0]),
        "layer_ids": list(best.strategy.placement.layer_ids),
        "seed": problem.space.seed,
        **surroundings(),
        "numbers": {key: best.numbers[key] for key in problem.keys},
        "derived": {key: best.numbers[key] for key in problem.derived},
        "present": None
        if result.present is None
        else {
            "numbers": result.present.numbers,
            "strategy": result.present.strategy,
            column: result.present.metric,
        },
        "choices": [
            {"values": each.values, column: each.metric} | ({"reason": each.reason} if each.reason else {})
            for each in tried
        ],
        "objective": {"metric": problem.space.objective, column: best.metric},
        "sizes": [_size(*each) for each in zip(best.scenarios, best.times, strict=True)],
        "strategy": {"name": best.strategy.name, "exchange": list(best.strategy.placement.exchange)},
        "gate": None if best.table is None else {"lost": best.lost, "limit": problem.space.gate_loss},
        "constraints": [_constraint(met, column) for met in best.constraints],
        "stationarity": {"residual_per_range": _finite(best.residual)},
        "candidates": [
            {"name": each.name, f"own_{column}": _finite(each.own), f"here_{column}": _finite(each.here)}
            | {"residual_per_range": _finite(each.residual)}
            for each in result.candidates
        ],
        "starts": {f"first_{column}": _list(result.starts), f"last_{column}": _list(result.ended)},
        "evaluations": result.evaluations | {"all": sum(result.evaluations.values())},
        "tuning": None
        if result.tuning is None
        else {"stages": {f"{name}_s": per_layer(each) for name, each in result.tuning.stages.items()}},
        "evaluate": command,
        "notes": result.notes,
    }


def _size(scenario: Scenario, times: LayerTime) -> dict[str, Any]:
    stages = {f"{name}_s": float(seconds.mean()) for name, seconds in times.stages.items()}
    means = {"total_s": float(times.mean.mean()), "p95_s": float(times.p95.mean())}
    return {"batch_tokens": scenario.workload.batch_tokens, **stages, **means}


def _constraint(met: PricedConstraint, column: str) -> dict[str, Any]:
    return {
        "constraint": met.constraint.text,
        "left": met.left,
        "right": met.right,
        "slack": met.slack,
        "relative_excess": met.excess,
        f"{column}_per_unit_of_limit": _finite(met.shadow_price),
        "percent_per_percent_of_limit": None if met.elasticity is None else _finite(met.elasticity),
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _list(values: np.ndarray) -> list[float | None]:
    return [_finite(value) for value in values]


# For people.


def _shown(result: HardwareResult) -> tuple[float, str]:
    """Factor and unit of the metric for people."""
    column = METRICS[result.problem.space.objective].column
    return time_unit(result.best.metric) if column.endswith("_s") else (1.0, "")


def _print(result: HardwareResult, tried: list[TriedChoice], command: str) -> None:
    _print_numbers(result)
    if tried:
        _print_choices(result, tried)
    if result.best.constraints:
        _print_constraints(result)
    _print_candidates(result)
    counts = ", ".join(f"{count} to {name}" for name, count in result.evaluations.items())
    notes = [*result.notes, f"machines timed, forward and backward each as one: {counts}"]
    if result.tuning is not None:
        notes.append("what rounding and improving the placement timed is not counted")
    others = [str(size) for size in result.problem.space.batch_tokens or ()][1:]
    if others:
        notes.append(
            f"{SCENARIO} has the first size of batch; for the others --set workload.batch_tokens={others[0]} ..."
        )
    print_warnings([*notes, f"again: {command}"])


def _print_numbers(result: HardwareResult) -> None:
    problem, (factor, unit) = result.problem, _shown(result)
    told = f"{problem.space.objective} {result.best.metric * factor:.5g} {unit}".strip()
    title = (
        f"{_name(result)}: {told} with {result.best.strategy.name}; {element_bytes(result.best.scenarios[0]).told()}"
    )
    table, present = new_table(title, "number", ("best", "present", "from", "to")), result.present
    now = {} if present is None else {key: f"{value:.5g}" for key, value in present.numbers.items()}
    for key, bounds in problem.space.variables.items():
        limits = (f"{value:.5g}" for value in (bounds.start, bounds.stop))
        table.add_row(escape(key), f"{result.best.numbers[key]:.5g}", now.get(key, "-"), *limits)
    for key in problem.derived:
        table.add_row(escape(key), f"{result.best.numbers[key]:.5g}", now.get(key, "-"), "derived", "")
    name = f"{problem.space.objective} {unit}".strip()
    if present is not None:
        table.add_row(name, f"{result.best.metric * factor:.5g}", f"{present.metric * factor:.5g}", "", "")
        table.caption = f"present: the scenario's own machine with {present.strategy}; constraints may not hold there"
    print_table(table)


def _print_choices(result: HardwareResult, tried: list[TriedChoice]) -> None:
    """Print the metric that every combination of choices reached in a short search, the best first.

    A combination that failed has the reason in place of the metric.
    """
    factor, unit = _shown(result)
    table = Table(title=f"choices after a short search, {result.problem.space.objective} {unit}".strip())
    for key in tried[0].values:
        table.add_column(key, no_wrap=True)
    table.add_column("best", justify="right")
    for each in _best_first(result, tried):
        told = each.reason if each.metric is None else f"{each.metric * factor:.5g}"
        table.add_row(*(escape(str(value)) for value in each.values.values()), escape(told))
    print_table(table)


def _best_first(result: HardwareResult, tried: list[TriedChoice]) -> list[TriedChoice]:
    sign = 1 if METRICS[result.problem.space.objective].lower_is_better else -1
    return sorted(tried, key=lambda each: np.inf if each.metric is None else sign * each.metric)


def _print_constraints(result: HardwareResult) -> None:
    factor, unit = _shown(result)
    table = Table(title=f"constraints, and what 1 more of the limit adds to {result.problem.space.objective}")
    table.add_column("constraint")
    for column in ("left", "right", "slack", f"1 more adds, {unit or '1'}", "1 % more adds, %"):
        table.add_column(column, justify="right")
    for met in result.best.constraints:
        slack = "none" if abs(met.excess) < MET else f"{met.slack:.4g}"
        price = ["-" if value is None else f"{value:.4g}" for value in (met.shadow_price * factor, met.elasticity)]
        table.add_row(escape(met.constraint.text), f"{met.left:.5g}", f"{met.right:.5g}", slack, *price)
    print_table(table)


def _print_candidates(result: HardwareResult) -> None:
    """Every design: the best that it does on a machine of its own, and what it does on the best of all."""
    factor, unit = _shown(result)
    table = new_table(
        f"designs, {result.problem.space.objective} {unit}".strip(),
        "design",
        ("on its own best machine", "on this machine", "slope left, per range"),
    )
    for each in sorted(result.candidates, key=lambda each: each.own):
        table.add_row(each.name, f"{each.own * factor:.5g}", f"{each.here * factor:.5g}", f"{each.residual:.1g}")
    print_table(table)
