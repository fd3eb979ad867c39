"""From files to what computes: scenario, machine model, traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from jaxmoe.config import (
    FileTrace,
    Scenario,
    build_layer_model,
    build_model,
    build_topology,
    load_model,
    load_scenario,
)
from jaxmoe.des import Fabric, fabric_of
from jaxmoe.engine import Layer
from jaxmoe.errors import InputError
from jaxmoe.experiment.gating import drawn_trace, fitting_trace, hints_of_model, recorded_trace, source_of
from jaxmoe.memory import device_memory
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.exchange import Exchange
from jaxmoe.traces import (
    Batch,
    GatingTrace,
    Hints,
    LoadCounts,
    read_any,
    sample_batches,
)
from jaxmoe.tune.problem import suited
from jaxmoe.tune.settings import HYBRIDS

# Batches for tuning are drawn with seeds below 2**62. Those that judge come from seeds beyond, so no plan is
# ever judged on the batches it was tuned on, whatever seeds the scenario states.
EVALUATION_SEEDS = 2**64


# Keys and sections of a scenario that decide which trace a run is on, and which batches are drawn from it, whatever
# the machine. A sweep over any other number draws them once.
TRACE_KEYS = ("workload.trace", "model.num_experts", "model.top_k", "model.moe_layer_ids")
BATCH_KEYS = ("workload.batch_tokens", "evaluation")

Source = GatingTrace | LoadCounts


class OptionError(InputError):
    """An option or input that a run cannot use. The message gives the reason and the remedy."""


@dataclass(frozen=True)
class Inputs:
    """All inputs of a run but plans: scenario, layer model and gating trace.

    `model` is in the sharded mode. Its memory capacity is the part of a node's memory that the layers of `trace` may
    use.
    """

    scenario: Scenario
    moe: MoEModel
    model: Layer
    trace: GatingTrace  # the layers of this run, in order
    trace_path: str  # or what a synthetic one is drawn from
    topics: Mapping[str, GatingTrace] = field(default_factory=dict)  # by name, those that plans are tuned over

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.trace.layer_ids.tolist())

    @property
    def shape(self) -> tuple[int, int] | None:
        """The sides of the mesh; `None` for other networks."""
        return self.model.machine.topology.grid

    @property
    def num_nodes(self) -> int:
        return self.model.machine.num_nodes

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Exchanges that may be chosen for any placement: the scenario's own, then those of `tuning.exchanges`.

        Hybrids are left out: these rings suit placements that follow their groups. So are exchanges without the traffic
        between groups.
        """
        others = suited(self.scenario.tuning.exchanges, self.model.machine.topology)
        any_plan = (name for name in others if name != HYBRIDS and self.exchange(name).groups <= 1)
        named = (self.scenario.costs.exchange, *any_plan)
        return tuple(name for name in dict.fromkeys(named) if self.exchange(name).complete)

    @cached_property
    def _built(self) -> dict[Exchange | str, AbstractExchange]:
        return {}

    def exchange(self, described: Exchange | str) -> AbstractExchange:
        """An exchange, or that of a name, on this machine, built once. Raises `ExchangeError`."""
        if described not in self._built:
            self._built[described] = build_exchange(described, self.model.machine.topology)
        return self._built[described]

    @cached_property
    def fabric(self) -> Fabric:
        """The network as the simulator sees it, with all its paths."""
        router = self.scenario.hardware.router
        chunk = None if router.chunk_B is None else float(router.chunk_B)
        return fabric_of(self.model.machine.topology, chunk, router.cuts_through)

    @cached_property
    def evaluation_batches(self) -> Batch:
        """The batches on which every plan is evaluated, leaves [layer, batch, ...]."""
        return self.batches_of(self.scenario.workload.batch_tokens)

    @cached_property
    def validation_batches(self) -> Batch:
        """The evaluation batches that the event simulator replays, leaves [layer, batch, ...]."""
        return self.first_batches(self.evaluation_batches)

    @cached_property
    def routed_batches(self) -> Batch:
        """The batches on which every plan is evaluated, with the router's logits. Raises `TraceError` without them."""
        return self._evaluating(self.trace, self.scenario.workload.batch_tokens, logits=True)

    def batches_of(self, tokens: int) -> Batch:
        """Evaluation batches of another size. Raises `OptionError` where measured products do not reach it."""
        gemm = self.model.machine.die.gemm
        if gemm is not None and tokens > gemm.most_rows:
            raise OptionError(
                f"batches of {tokens} tokens are larger than the {gemm.most_rows:g} up to which the table at "
                "hardware.die.gemm goes; measure larger ones, or use smaller batches"
            )
        return self._evaluating(self.trace, tokens)

    def topic_batches(self, name: str) -> Batch:
        """The batches of a topic on which every plan is evaluated."""
        return self._evaluating(self.topics[name], self.scenario.workload.batch_tokens)

    def _evaluating(self, trace: GatingTrace, tokens: int, logits: bool = False) -> Batch:
        evaluation, consecutive = self.scenario.evaluation, self.scenario.workload.sampling == "consecutive"
        seed = EVALUATION_SEEDS + evaluation.seed
        return sample_batches(trace, tokens, evaluation.batches, seed, consecutive, logits=logits)

    def first_batches(self, batches: Batch) -> Batch:
        """The first of these batches, as many as the event simulator replays."""
        return jax.tree.map(lambda leaf: leaf[:, : self.scenario.validation.batches], batches)

    def capacity(self, layers: int) -> np.ndarray | None:
        """Memory that `layers` layers may take of every node when all layers get the same, B [node]."""
        capacity = self.model.machine.capacity
        return None if capacity is None else np.asarray(capacity, float) * layers / len(self.layer_ids)


def read_inputs(config: Path, overrides: Sequence[str] | None, trace: Path | None, layers: str | None) -> Inputs:
    """Read and check all inputs of a run but plans, which is also replayed.

    Raises `ConfigError`, `TraceError` or `OptionError`.
    """
    scenario = load_scenario(config, overrides or ())
    check_paths(scenario)
    return inputs_of(scenario, trace, layers)


def inputs_of(scenario: Scenario, trace: Path | None = None, layers: str | None = None) -> Inputs:
    """All inputs of a run but plans, from a scenario in memory. Raises `ConfigError`, `TraceError` or `OptionError`.

    Numbers of the scenario may be JAX tracers where only the machine and its costs depend on them.
    """
    moe = build_model(scenario.model)
    layer_ids = chosen_layers(layers, scenario, moe)
    check_memory(scenario, scenario.evaluation.batches, "batches", "evaluation.batches", moe, layers)
    if trace is None and isinstance(scenario.workload.trace, FileTrace):
        trace = Path(scenario.workload.trace.path)
    gating = drawn_trace(scenario, moe, layer_ids) if trace is None else recorded_trace(trace, moe)
    source = source_of(scenario) if trace is None else str(trace)
    topics = [Path(path) for path in scenario.tuning.topics]
    return Inputs(
        scenario=scenario,
        moe=moe,
        model=_with_memory_for(build_layer_model(scenario, "sharded"), len(layer_ids) / len(moe.moe_layer_ids)),
        trace=fitting_trace(gating, moe, layer_ids, scenario.workload, source),
        trace_path=source,
        topics={
            name: fitting_trace(recorded_trace(path, moe), moe, layer_ids, scenario.workload, str(path))
            for name, path in zip(_names(topics), topics, strict=True)
        },
    )


# What the tokens of a batch take, with the copies that JAX makes of them: experts and draws, int32 and float32.
COPIES = 3


def check_memory(scenario: Scenario, count: int, called: str, lower: str, moe: MoEModel, layers: str | None) -> None:
    """Refuse so many batches, `called` by this name, that memory does not hold, before any work; `lower` lowers them.

    Raises `OptionError`.
    """
    tokens = scenario.workload.batch_tokens
    token_layers = count * tokens * len(chosen_layers(layers, scenario, moe))
    needed, there = token_layers * COPIES * 4 * (2 * moe.top_k + 3), device_memory()
    if needed > there:
        raise OptionError(
            f"{count} {called} of {tokens} tokens need about {needed / 1e9:.0f} GB, and the memory is "
            f"{there / 1e9:.0f} GB; lower {lower} or workload.batch_tokens, or choose some layers with --layers"
        )


# What the simulator's lists of all paths take for each link of one, also of those along the other direction first, B.
PATH_LINK = 48


def check_paths(scenario: Scenario) -> None:
    """Refuse a mesh whose paths memory does not hold, all of which the event simulator lists, before any work.

    Raises `OptionError`.
    """
    topology = build_topology(scenario.hardware)
    hops = 1 if topology.grid is None else sum((side - 1 / side) / 3 for side in topology.grid)  # of two nodes, mean
    needed, there = PATH_LINK * topology.num_nodes**2 * hops, device_memory()
    if needed > there:
        raise OptionError(
            f"hardware has {topology.num_nodes} nodes; all paths between them, for the event simulator, need about "
            f"{needed / 1e9:.0f} GB, and the memory is {there / 1e9:.0f} GB; take fewer nodes"
        )


def read_files(paths: Sequence[Path], model: str | None) -> dict[str, Source]:
    """Every file by its name, or its whole path where two have the same name.

    `model`, a name or a file, supplies the sizes of the model that a file does not state. Raises `TraceError`,
    `ConfigError` or `OptionError`.
    """
    if len(set(paths)) < len(paths):
        raise OptionError("a file is given twice; give each file once")
    return {name: read_file(path, model) for name, path in zip(_names(paths), paths, strict=True)}


def _names(paths: Sequence[Path]) -> list[str]:
    """The name of every file, or its whole path where two have the same name."""
    stems = [path.stem for path in paths]
    return [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]


def read_file(path: Path, model: str | None) -> Source:
    """Read a gating trace or load counts of any format; `model` as in `read_files`."""
    return read_any(path, hints_of(model)).content


def hints_of(model: str | None) -> Hints:
    """The sizes that a trace file may not state: experts, top-k and layers of a model; empty without a model.

    Raises `ConfigError`.
    """
    if model is None:
        return Hints()
    return hints_of_model(build_model(load_model(model, "--model")))


def chosen_layers(text: str | None, scenario: Scenario, moe: MoEModel) -> tuple[int, ...]:
    """The layers that `--layers` names, else those of the scenario, else all MoE layers. Raises `OptionError`."""
    if text is None:
        stated = scenario.evaluation.layers
        return moe.moe_layer_ids if stated is None else tuple(sorted({*stated}))
    try:
        chosen = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise OptionError(f"--layers is {text!r}, expected layer numbers such as 0,8,16") from None
    unknown = [layer for layer in chosen if layer not in moe.moe_layer_ids]
    if unknown:
        raise OptionError(f"--layers names {unknown}, but {moe.name} has experts in layers {list(moe.moe_layer_ids)}")
    return chosen


def _with_memory_for(model: Layer, part: float) -> Layer:
    """The model with the part of every node's memory that this run's layers may take."""
    if model.machine.capacity is None or part == 1:
        return model
    return eqx.tree_at(lambda m: m.machine.memory[-1].capacity, model, replace_fn=lambda capacity: capacity * part)
