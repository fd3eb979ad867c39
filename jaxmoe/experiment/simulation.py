"""A system over iterations, beside the same plan left alone: all in the model, some in the event simulator too."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmoe.des import layer_seconds, movement_seconds
from jaxmoe.experiment.clock import Report, StageClock
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import EVALUATION_SEEDS, Inputs
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.experiment.validation import Figures, agreement
from jaxmoe.latency import Decisions, LayerTime
from jaxmoe.latency.schedule import STAGES
from jaxmoe.policies import LayerExchanges, broadcast_experts, rollout
from jaxmoe.systems import Setting, system_of
from jaxmoe.traces import Batch, GatingTrace, sample_batches, successive_batches

STATIC = "static"


@dataclass(frozen=True)
class Iterations:
    """What passes the layers: batches with leaves [layer, step, ...], and the gating that was seen before them."""

    batches: Batch
    successive: bool  # tokens of the trace in their order, else drawn from all of it
    history: GatingTrace
    foresight: bool  # the history is of the same tokens

    @property
    def count(self) -> int:
        return self.batches.experts.shape[1]


@dataclass(frozen=True)
class Run:
    """One system over all iterations: times [step, layer], experts broadcast [step, layer], and what was replayed.

    `served` [replay, layer, token, top_k] is where choices were computed. `simulated` are seconds of the stages
    together, and `moved` those of the movement alone, [replay, layer].
    """

    time: LayerTime
    broadcast: np.ndarray
    served: np.ndarray | None
    simulated: np.ndarray
    moved: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Of every iteration, all layers together, [step]."""
        return np.asarray(self.time.total.sum(axis=1))

    @property
    def staged(self) -> np.ndarray:
        """The stages of the layer alone, one after the other, as the simulator has them, [step, layer]."""
        return np.sum([self.time.stages[name] for name in STAGES], axis=0)

    @property
    def movement(self) -> np.ndarray:
        """Seconds that weights travel, [step, layer]."""
        return np.asarray(self.time.stages.get("movement", np.zeros(self.time.total.shape)))

    @property
    def late(self) -> float:
        """The part of all broadcasts that take longer than the layer before."""
        before = np.concatenate([np.zeros(1), self.time.total.ravel()[:-1]]).reshape(self.time.total.shape)
        sent = self.broadcast > 0
        return float((self.movement > before)[sent].mean()) if sent.any() else 0.0


@dataclass(frozen=True)
class Simulation:
    """A plan under a system and left alone, by name; `replayed` are the steps that the event simulator replays."""

    strategy: Strategy
    system: str
    iterations: Iterations
    replayed: tuple[int, ...]
    runs: dict[str, Run]

    @property
    def speedup(self) -> float:
        """Time of the static plan over that of the system."""
        return float(self.runs[STATIC].seconds.sum() / self.runs[self.system].seconds.sum())

    def simulated_speedup(self) -> tuple[float, float]:
        """The same on the replayed iterations and without movements: by the model, and by the simulator."""
        static, system = self.runs[STATIC], self.runs[self.system]
        steps = list(self.replayed)
        modelled = static.staged[steps].sum() / system.staged[steps].sum()
        return float(modelled), float(static.simulated.sum() / system.simulated.sum())

    def agreement(self, name: str) -> Figures:
        """Model and simulator on all layers of the replayed iterations."""
        run = self.runs[name]
        return agreement(run.staged[list(self.replayed)], run.simulated)


def iterations_of(inputs: Inputs, count: int, history: GatingTrace | None = None) -> Iterations:
    """The last tokens of the trace in their order, where it is long enough, else batches drawn from it.

    What was seen before is `history`, or the tokens before the first one, or, where these are none, the same trace.
    """
    trace, tokens = inputs.trace, inputs.scenario.workload.batch_tokens
    seed = EVALUATION_SEEDS + inputs.scenario.evaluation.seed
    batches = successive_batches(trace, tokens, count, seed)
    first = trace.num_tokens - tokens * count
    if history is None:
        history = trace.select_tokens(np.arange(first)) if first >= tokens else trace
    drawn = sample_batches(trace, tokens, count, seed) if batches is None else batches
    return Iterations(drawn, batches is not None, history, foresight=history is trace)


def simulate(
    inputs: Inputs, strategy: Strategy, iterations: Iterations, replays: int, clock: StageClock, report: Report
) -> Simulation:
    """Run the scenario's system and the static plan. Raises `UnsuitableSystemError`."""
    placement, section = strategy.placement, inputs.scenario.system
    setting = Setting(
        share=placement.share,
        mode=placement.mode,
        model=replace(inputs.model, mode=placement.mode),
        moe=inputs.moe,
        weight_bytes_per_element=inputs.scenario.costs.weight_bytes_per_element,
        history=iterations.history,
    )
    systems = {STATIC: system_of(STATIC)}
    systems[section.name] = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    replayed = tuple(dict.fromkeys(np.linspace(0, iterations.count - 1, replays).round().astype(int).tolist()))
    exchanges = LayerExchanges.from_names(placement.exchange, inputs.exchange)
    runs: dict[str, Run] = {}
    for name, system in systems.items():
        with clock.stage("rollout"):
            method = system.method(setting)
            _, time, kept = rollout(method, setting.model, iterations.batches, exchanges, keep=_kept)
            time, (sent, served) = time.as_numpy(), jax.tree.map(np.asarray, kept)
        served = None if served is None else served[list(replayed)]
        report("roll out", len(runs) + 1, len(systems))
        with clock.stage("simulate"):
            simulated = _simulated(inputs, strategy, iterations, replayed, served, name, report)
            moved = _moved(inputs, strategy, sent[list(replayed)])
        runs[name] = Run(time, sent.sum(axis=-1), served, simulated, moved)
    return Simulation(strategy, section.name, iterations, replayed, runs)


def _kept(decisions: Decisions) -> tuple[Any, Any]:
    return broadcast_experts(decisions), decisions.served


def batch_at(iterations: Iterations, row: int, step: int) -> Batch:
    """The batch of one layer and iteration, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[row, step]), iterations.batches)


def _simulated(
    inputs: Inputs,
    strategy: Strategy,
    iterations: Iterations,
    replayed: tuple[int, ...],
    served: np.ndarray | None,
    name: str,
    report: Report,
) -> np.ndarray:
    """Seconds in the event simulator, [replay, layer]."""
    placement = strategy.placement
    seconds = np.zeros((len(replayed), len(placement.share)))
    for done, (at, row) in enumerate(np.ndindex(seconds.shape), start=1):
        # Stages are compared one after the other: run-time decisions are of whole batches.
        layer = replace(describe(inputs, placement.mode, placement.exchange[row]), micro_batches=1)
        decided = None if served is None else served[at, row]
        batch = batch_at(iterations, row, replayed[at])
        seconds[at, row] = layer_seconds(layer, placement.share[row], batch, decided)
        report(f"simulate {name}", done, seconds.size)
    return seconds


def _moved(inputs: Inputs, strategy: Strategy, sent: np.ndarray) -> np.ndarray:
    """Seconds of the broadcasts of experts `sent` [replay, layer, expert] in the event simulator, [replay, layer]."""
    placement, seconds = strategy.placement, np.zeros(sent.shape[:2])
    for at, row in np.argwhere(sent.any(axis=-1)):
        layer = describe(inputs, placement.mode, placement.exchange[row])
        everywhere = np.repeat(sent[at, row][:, None], inputs.num_nodes, axis=1)
        seconds[at, row] = movement_seconds(layer, placement.share[row].astype(float), everywhere)
    return seconds


def simulation_report(simulation: Simulation) -> dict[str, Any]:
    """Everything in seconds; an iteration is all layers of the run together."""
    iterations, placement = simulation.iterations, simulation.strategy.placement
    modelled, simulated = simulation.simulated_speedup()
    return {
        "plan": {
            "name": simulation.strategy.name,
            "mode": placement.mode,
            "exchange": [*placement.exchange],
            "fits": simulation.strategy.fits,
            "note": simulation.strategy.note,
        },
        "system": simulation.system,
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
        "runs": {name: _run_report(simulation, name) for name in simulation.runs},
    }


def _run_report(simulation: Simulation, name: str) -> dict[str, Any]:
    run = simulation.runs[name]
    return {
        "mean": {f"{stage}_s": value for stage, value in mean_stages(run).items()},
        "p95_total_s": float(np.quantile(run.seconds, 0.95)),
        "total_s": run.seconds.tolist(),
        "experts_broadcast_per_layer": float(run.broadcast.mean()),
        "broadcasts_longer_than_the_layer_before": run.late,
        "simulated_s": run.simulated.sum(axis=1).tolist(),
        "simulated_movement_s": run.moved.sum(axis=1).tolist(),
        "model_movement_s": run.movement[list(simulation.replayed)].sum(axis=1).tolist(),
        "agreement": simulation.agreement(name),
    }


def mean_stages(run: Run) -> dict[str, float]:
    """Seconds of an iteration by stage, and in total, as means over iterations."""
    stages = {name: run.time.stages[name] for name in STAGES} | {"movement": run.movement, "total": run.time.total}
    return {name: float(seconds.sum(axis=1).mean()) for name, seconds in stages.items()}
