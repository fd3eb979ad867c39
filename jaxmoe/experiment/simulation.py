"""A system and its baselines over iterations: all iterations in the model, some in the event simulator too."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.config import Scenario, build_model, element_bytes
from jaxmoe.config.networks import WafersConfig
from jaxmoe.engine import LayerTime
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.gating import drawn_sequences
from jaxmoe.experiment.inputs import EVALUATION_SEEDS, Inputs, check_memory, check_paths
from jaxmoe.experiment.limits import LayerLimit, layer_limits, usual_limit
from jaxmoe.experiment.stage_timer import Report, StageTimer
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.experiment.validation import Figures, agreement
from jaxmoe.experiment.whole_model import Step, WholeModel, step_of_run, step_report
from jaxmoe.hardware import AbstractTopology
from jaxmoe.methods import AbstractRun, DeploymentSetting, RolloutResult, UnsuitableSystemError, system_of
from jaxmoe.traces import (
    Batch,
    GatingTrace,
    request_batches,
    request_windows,
    sample_batches,
    successive_batches,
)


@dataclass(frozen=True)
class IterationBatches:
    """Input of a simulation: batches with leaves [layer, step, ...], and the gating trace seen before them."""

    batches: Batch
    successive: bool  # tokens of the trace in their order, else drawn from all of it
    history: GatingTrace
    foresight: bool  # the history is of the same tokens

    @property
    def count(self) -> int:
        return self.batches.experts.shape[1]


@dataclass(frozen=True)
class SystemRun:
    """Times of one system: over all iterations by the model, over some in the event simulator.

    `simulated`: simulated seconds of the stages that `rolled.compared` times by the model. `moved`: simulated seconds
    of weight movements, which are replayed apart. Both [replay, layer].
    """

    system: AbstractRun
    rolled: RolloutResult
    simulated: np.ndarray
    moved: np.ndarray

    @property
    def time(self) -> LayerTime:
        return self.rolled.time

    @cached_property
    def seconds(self) -> np.ndarray:
        """Modelled seconds of every iteration, all layers together, [step]."""
        return np.asarray(self.time.total.sum(axis=1))

    def limit(self, topology: AbstractTopology) -> LayerLimit | None:
        """The limit of most layers, as a mean over iterations; `None` where busy resources were not kept."""
        return usual_limit(layer_limits(self.time.by_layer(), topology)) if self.time.busy else None

    @property
    def movement(self) -> np.ndarray:
        """Modelled seconds that weights travel, [step, layer]."""
        moved = [seconds for name, seconds in self.time.stages.items() if name.startswith("movement")]
        return np.asarray(sum(moved, np.zeros(self.time.total.shape)))


@dataclass(frozen=True)
class Simulation:
    """Runs by name, the baseline first and the system last; `replayed` are the steps that the event simulator has."""

    strategy: Strategy
    iterations: IterationBatches
    replayed: tuple[int, ...]
    runs: dict[str, SystemRun]

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    @property
    def system(self) -> str:
        return next(reversed(self.runs))

    @property
    def stages(self) -> list[str]:
        """Names of the stages of all runs, in the order of the run that has most of them."""
        orders = sorted((run.time.order for run in self.runs.values()), key=len, reverse=True)
        return [*dict.fromkeys(name for order in orders for name in order)]

    @property
    def speedup(self) -> float:
        """Time of the baseline over that of the system."""
        return float(self.runs[self.baseline].seconds.sum() / self.runs[self.system].seconds.sum())

    def simulated_speedup(self) -> tuple[float, float]:
        """Speedup on the replayed iterations without movements of weights: by the model, and by the event simulator."""
        first, system = self.runs[self.baseline], self.runs[self.system]
        steps = list(self.replayed)
        modelled = first.rolled.compared[steps].sum() / system.rolled.compared[steps].sum()
        return float(modelled), float(first.simulated.sum() / system.simulated.sum())

    def agreement(self, name: str) -> Figures:
        """Agreement of model and event simulator over all layers of the replayed iterations."""
        run = self.runs[name]
        return agreement(run.rolled.compared[list(self.replayed)], run.simulated)


def iterations_of(inputs: Inputs, count: int, history: GatingTrace | None = None) -> IterationBatches:
    """Batches for `count` iterations: the last tokens of the trace in order if it is long enough, else drawn from it.

    A system that keeps requests apart gets successive tokens of the same requests instead.

    The trace seen before is `history`; by default the tokens before the first batch, or the whole trace if there are
    too few.
    """
    trace, tokens = inputs.trace, inputs.scenario.workload.batch_tokens
    seed = EVALUATION_SEEDS + inputs.scenario.evaluation.seed
    if inputs.scenario.system.keeps_requests:
        kept, before = request_batches(trace, tokens, count, seed)
        if history is None:
            history = trace.select_tokens(np.flatnonzero(before)) if before.any() else trace
        return IterationBatches(kept, True, history, foresight=history is trace)
    batches = successive_batches(trace, tokens, count, seed, numbered=True)
    first = trace.num_tokens - tokens * count
    if history is None:
        history = trace.select_tokens(np.arange(first)) if first >= tokens else trace
    drawn = sample_batches(trace, tokens, count, seed, numbered=True) if batches is None else batches
    return IterationBatches(drawn, batches is not None, history, foresight=history is trace)


def check_iterations(scenario: Scenario, recorded: Path | None, layers: str | None) -> None:
    """Refuse iterations and machines that memory or a trace still to be drawn do not suffice for, before any work.

    Raises `OptionError` or `TraceError`.
    """
    workload, count = scenario.workload, scenario.evaluation.iterations
    moe = build_model(scenario.model)
    check_memory(scenario, count, "iterations", "--iterations (evaluation.iterations)", moe, layers)
    check_paths(scenario)
    sequences = drawn_sequences(workload) if recorded is None else None
    if scenario.system.keeps_requests and sequences is not None:
        request_windows(*sequences, workload.batch_tokens, count)


def setting_of(inputs: Inputs, strategy: Strategy, history: GatingTrace) -> DeploymentSetting:
    """The setting that a system is built for: placement, layer model, data widths, batch size, trace, history."""
    placement, scenario = strategy.placement, inputs.scenario
    return DeploymentSetting(
        share=placement.computed,
        mode=placement.computed_mode,
        exchange=placement.exchanges(),
        model=replace(inputs.model, mode=placement.computed_mode),
        moe=inputs.moe,
        bytes=element_bytes(scenario),
        batch_tokens=scenario.workload.batch_tokens,
        context_tokens=scenario.workload.context_tokens,
        trace=inputs.trace,
        history=history,
        build_exchange=inputs.exchange,
        describe=lambda mode, exchange: describe(inputs, mode, exchange),
        wafer_shape=scenario.hardware.wafer_shape if isinstance(scenario.hardware, WafersConfig) else None,
        clusters=scenario.hardware.switched,
        copies=placement.copies,
    )


def simulate(
    inputs: Inputs, strategy: Strategy, iterations: IterationBatches, replays: int, clock: StageTimer, report: Report
) -> Simulation:
    """Run the scenario's system and its baselines. Raises `UnsuitableSystemError`."""
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    if strategy.placement.copies is not None and not system.serves_copies:
        raise UnsuitableSystemError(
            f"plan {strategy.name} has copies of experts, which the system {section.name}, or a gate before it, does "
            "not serve; use the system static without a gate, or a plan of one copy of each expert"
        )
    replayed = tuple(dict.fromkeys(np.linspace(0, iterations.count - 1, replays).round().astype(int).tolist()))
    runs: dict[str, SystemRun] = {}
    with clock.stage("rollout"):
        ready = system.runs(setting_of(inputs, strategy, iterations.history))
    for name, run in ready.items():
        with clock.stage("rollout"):
            rolled = run.rollout(iterations.batches)
        report("roll out", len(runs) + 1, len(ready))
        with clock.stage("simulate"):
            runs[name] = SystemRun(run, rolled, *_replayed(run, rolled, iterations, replayed, name, report))
    return Simulation(strategy, iterations, replayed, runs)


def batch_at(iterations: IterationBatches, row: int, step: int) -> Batch:
    """The batch of one layer and iteration, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[row, step]), iterations.batches)


def _replayed(
    run: AbstractRun,
    rolled: RolloutResult,
    iterations: IterationBatches,
    replayed: tuple[int, ...],
    name: str,
    report: Report,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of stages and of movements in the event simulator, [replay, layer]."""
    seconds = np.zeros((len(replayed), rolled.time.total.shape[1]))
    moved = np.zeros_like(seconds)
    for done, (at, row) in enumerate(np.ndindex(seconds.shape), start=1):
        step = replayed[at]
        seconds[at, row] = run.replay(rolled, batch_at(iterations, row, step), step, row)
        moved[at, row] = run.replay_movement(rolled, step, row)
        report(f"simulate {name}", done, seconds.size)
    return seconds, moved


def steps_of(inputs: Inputs, simulation: Simulation) -> dict[str, Step]:
    """The mean step of the whole model, by run."""
    model = WholeModel.of(inputs)
    return {name: step_of_run(model, run.time, run.system.times_shared) for name, run in simulation.runs.items()}


def simulation_report(inputs: Inputs, simulation: Simulation) -> dict[str, Any]:
    """The simulation for `summary.json`: times in seconds, of all layers of the run together."""
    iterations, placement = simulation.iterations, simulation.strategy.placement
    modelled, simulated = simulation.simulated_speedup()
    whole, steps = WholeModel.of(inputs), steps_of(inputs, simulation)
    return {
        "plan": {
            "name": simulation.strategy.name,
            "mode": placement.mode,
            "exchange": [*placement.exchange],
            "fits": simulation.strategy.fits,
            "note": simulation.strategy.note,
        },
        "system": simulation.system,
        "baseline": simulation.baseline,
        "stages": simulation.stages,
        "iterations": iterations.count,
        "successive": iterations.successive,
        "history_tokens": iterations.history.num_tokens,
        "speedup": simulation.speedup,
        "replayed": {
            "iterations": [*simulation.replayed],
            "model_speedup": modelled,
            "simulated_speedup": simulated,
            "note": "stages of layers with barriers; movements are replayed apart, with the network to themselves",
        },
        "whole_model": whole.report()
        | {"counted": whole.counted, "runs": {name: step_report(step) for name, step in steps.items()}},
        "runs": {name: _run_report(inputs, simulation, name) for name in simulation.runs},
    }


def _run_report(inputs: Inputs, simulation: Simulation, name: str) -> dict[str, Any]:
    run, steps = simulation.runs[name], list(simulation.replayed)
    limit = run.limit(inputs.model.machine.topology)
    return {
        "limit": None if limit is None else limit.text,
        "mean": {f"{stage}_s": value for stage, value in mean_stages(simulation, name).items()},
        "p95_total_s": float(np.quantile(run.seconds, 0.95)),
        "total_s": run.seconds.tolist(),
        **run.rolled.figures,
        "simulated_s": run.simulated.sum(axis=1).tolist(),
        "simulated_movement_s": run.moved.sum(axis=1).tolist(),
        "model_movement_s": run.movement[steps].sum(axis=1).tolist(),
        "agreement": simulation.agreement(name),
    }


def mean_stages(simulation: Simulation, name: str) -> dict[str, float]:
    """Seconds of an iteration by stage, and in total, as means over iterations; 0 for a stage of other runs alone."""
    time = simulation.runs[name].time
    missing = np.zeros(time.total.shape)
    stages = {stage: time.stages.get(stage, missing) for stage in simulation.stages} | {"total": time.total}
    return {stage: float(seconds.sum(axis=1).mean()) for stage, seconds in stages.items()}
