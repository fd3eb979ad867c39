"""A scenario's whole model on any machine, timed by the engine: plan, exchange and system inside a deployed step."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Scenario, build_even_parts, build_model, element_bytes, unstated_energy
from jaxmoe.config.deployment import DeploymentConfig
from jaxmoe.config.dies import FittedGemmConfig
from jaxmoe.engine import EvenPart, EvenParts, LayerTime
from jaxmoe.experiment.deployment import (
    Deployed,
    costs_of,
    deployed,
    drafted_of,
    other_layouts,
    stated_deployment,
    users_of,
)
from jaxmoe.experiment.inputs import Inputs, OptionError, inputs_of
from jaxmoe.experiment.simulation import IterationBatches, iterations_of, setting_of
from jaxmoe.experiment.strategies import Strategy, plan_of_system
from jaxmoe.hardware import Machine
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, read_exchanges
from jaxmoe.hardware.gpu.files import KernelFile, read_kernels
from jaxmoe.methods import AbstractRun, system_of
from jaxmoe.serving.closed_loop import BACKENDS, Overheads
from jaxmoe.serving.deployment import Deployment, Exchange, check_attention
from jaxmoe.serving.machine_step import Context, MachineStep, SystemLayers
from jaxmoe.serving.memory import DeviceMemory, DoesNotFitError, does_not_fit, with_draft
from jaxmoe.serving.step import AbstractStep
from jaxmoe.traces import Batch

ENGINE: Exchange = "engine"
# Keys of a deployment that say how kernels of GPUs are laid out, and what says so on other machines.
ELSEWHERE = {
    **dict.fromkeys(("tensor", "data"), "attention is that of the system, such as system: {name: moentwine, tp: 4}"),
    "expert_ranks": "experts lie by system.plan",
    **dict.fromkeys(("products", "experts", "cache"), "bytes are those of model.bytes and costs"),
    "overlap": "stages follow each other by schedule",
    "processors": "an exchange takes none of a node's processors",
    "redundant_experts": "copies of experts are those of system.plan",
    "gating_spread": "choices are those of workload.trace",
}
MOST_TOKENS = 2**16  # of the iterations that a system is run over


def in_engine(scenario: Scenario) -> bool:
    """Whether the engine times a deployment: it asks for that, or its machine has no kernels that were measured."""
    asked, die = scenario.deployment, scenario.hardware.die
    measured = die is not None and isinstance(die.gemm, FittedGemmConfig)
    return asked is not None and (asked.exchange == ENGINE or not measured)


def deployed_anywhere(
    scenario: Scenario,
    read: Callable[[Path], KernelFile] = read_kernels,
    read_deepep: Callable[[Path], ExchangeFile] = read_exchanges,
) -> Deployed[AbstractStep]:
    """A scenario's deployment on any machine; on GPUs by kernels and exchanges of the files that are read so."""
    return next(_on_machine(scenario)) if in_engine(scenario) else deployed(scenario, read, read_deepep)


def compared(scenario: Scenario) -> Iterator[Deployed[AbstractStep]]:
    """A scenario's deployment, and others to compare with: layouts on as many GPUs, or the baseline of its system."""
    if in_engine(scenario):
        yield from _on_machine(scenario)
    else:
        own = deployed(scenario)
        yield own
        yield from other_layouts(scenario, own)


def deployed_on_machine(scenario: Scenario) -> Deployed[MachineStep]:
    """The deployment of a scenario that the engine times. Raises `OptionError` or `DeploymentError`."""
    return next(_on_machine(scenario))


def experts_timed(inputs: Inputs) -> Callable[[Batch], LayerTime]:
    """Times [step, layer] of a system for batches of any choices, one token of context before each."""
    strategy = deployed_plan(inputs)

    def timed(batches: Batch) -> LayerTime:
        runs, _ = runs_of_size(inputs, strategy, batches.experts.shape[2], Context(1.0, 1.0))
        return runs[[*runs][-1]].rollout(batches).time

    return timed


def _on_machine(scenario: Scenario) -> Iterator[Deployed[MachineStep]]:
    """The system of a scenario, then its baseline. Raises `OptionError` or `DeploymentError`."""
    asked = stated_deployment(scenario)
    _check(scenario, asked)
    check_attention(build_model(scenario.model))
    inputs = inputs_of(scenario)
    strategy, users = deployed_plan(inputs), users_of(asked)
    backend = BACKENDS[asked.backend]
    memory = _memory(inputs, strategy, users.prompt + users.output / 2, backend.memory_part)
    decoded = asked.concurrency * (1 + drafted_of(asked))
    _check_trace(inputs, asked, decoded)
    chunk = float(min(backend.chunk, inputs.trace.num_tokens - decoded))
    notes = tuple(_notes(inputs, float(backend.chunk), chunk))
    for layers in _systems(inputs, strategy):
        step = step_on_machine(scenario, layers, notes)
        yield Deployed(
            step, memory, users, backend._replace(chunk=chunk, seats=math.inf), Overheads(), costs_of(scenario)
        )


def step_on_machine(scenario: Scenario, layers: SystemLayers, notes: tuple[str, ...] = ()) -> MachineStep:
    """A step of a scenario's model on all nodes of its machine, whose MoE layers take what `layers` say."""

    @cache
    def beside(context: Context) -> EvenParts:
        return build_even_parts(scenario, context.tokens, context.cached)

    asked, nodes = scenario.deployment, scenario.hardware.num_nodes
    backend, drafted = ("", 0) if asked is None else (asked.backend, drafted_of(asked))
    deployment = Deployment(backend, tensor=nodes, exchange=ENGINE, drafted=drafted)
    return MachineStep(build_model(scenario.model), deployment, layers, beside, _head(scenario), notes)


def _check(scenario: Scenario, asked: DeploymentConfig) -> None:
    by_kernels = "leave exchange: engine out" if asked.exchange == ENGINE else "take a machine with measured kernels"
    for key, instead in ELSEWHERE.items():
        if getattr(asked, key) != type(asked).model_fields[key].default:
            raise OptionError(
                f"deployment.{key} is {getattr(asked, key)}, but {scenario.hardware.name} is timed by the engine, "
                f"where {instead}; drop it, or {by_kernels}"
            )
    if asked.exchange not in (ENGINE, "collectives"):
        raise OptionError(
            f"deployment.exchange is {asked.exchange}, whose kernels {scenario.hardware.name} does not have; expected "
            f"{ENGINE}, with the exchange of costs.exchange"
        )


def _check_trace(inputs: Inputs, asked: DeploymentConfig, decoded: int) -> None:
    """Raise `OptionError` where the trace has too few tokens for a step with so many and a prompt that is read."""
    tokens, each = inputs.trace.num_tokens, decoded // asked.concurrency
    if decoded >= tokens:
        raise OptionError(
            f"deployment.concurrency is {asked.concurrency}; expected less than {-(-tokens // each)}, as a step takes "
            f"{each} of the {tokens} tokens of workload.trace for each. Lower it, or take a longer trace"
        )


def _notes(inputs: Inputs, usual: float, chunk: float) -> Iterator[str]:
    yield "no constants and seats of a backend count: they are of GPUs"
    yield "what all nodes share evenly, beside the layers of the system, sends nothing"
    if chunk < usual:
        yield f"a step reads at most {chunk:.0f} tokens of prompts, not {usual:.0f}: workload.trace has no more"
    if inputs.moe.vocabulary_size is None:
        yield "the head is not counted: model.vocabulary_size is not given"
    if inputs.model.machine.energy is not None and (left := unstated_energy(inputs.scenario.hardware)):
        yield f"energy counts nothing for what the machine does not state: {', '.join(left)}"
    if inputs.model.machine.capacity is None:
        yield "the capacity of memory limits nothing: the machine gives none"
    if not inputs.model.machine.memory:
        yield "reading weights takes no time, and decoding mostly waits for it: the machine gives no memory's bandwidth"


def _head(scenario: Scenario) -> EvenPart:
    """The product with the vocabulary, of a token that is answered."""
    model = build_model(scenario.model)
    weights = float((model.vocabulary_size or 0) * model.hidden_size)
    numbers = (2 * weights, weights * element_bytes(scenario).dense, 0.0)
    return EvenPart(*(jnp.asarray(number, jnp.float32) for number in numbers))


def _memory(inputs: Inputs, strategy: Strategy, context: float, part: float) -> DeviceMemory:
    """Memory of the fullest node: experts by the plan, all else divided evenly; endless where no capacity is given.

    Raises `DoesNotFitError`.
    """
    model, widths, nodes = inputs.moe, element_bytes(inputs.scenario), inputs.num_nodes
    model = with_draft(model, drafted_of(stated_deployment(inputs.scenario)))
    sparse = len(model.moe_layer_ids)
    capacity = inputs.model.machine.capacity
    held = strategy.placement.memory(float(inputs.model.costs.expert_bytes)).max() / len(inputs.layer_ids)
    dense = sparse * model.shared_expert_parameters + model.num_dense_layers * model.dense_ffn_parameters
    vocabulary = (model.embedding_parameters if model.vocabulary_size else 0) + dense
    attention = model.num_attention_layers * model.attention_parameters * widths.attention
    cache = model.num_attention_layers * model.known_attention.cache_elements * model.context_read(context) * widths.kv
    timed = len(inputs.moe.moe_layer_ids) / len(inputs.layer_ids)
    memory = DeviceMemory(
        capacity=math.inf if capacity is None else float(capacity.min()) * timed * part,
        experts=float(sparse * held),
        other_weights=float(vocabulary * widths.dense + attention) / nodes,
        workspace=0.0,
        cache_per_sequence=float(cache / nodes),
    )
    if memory.sequences < 1:
        whole = (memory.other_weights + memory.cache_per_sequence) * nodes
        whole += sparse * model.num_experts * float(inputs.model.costs.expert_bytes)
        fewest = math.ceil(whole / memory.capacity)
        spread = "this many" if fewest <= nodes else fewest
        remedy = (
            f"It fits on {spread} nodes with system: {{name: static, plan: tp}}, which spreads experts evenly; or take "
            "narrower weights or shorter sequences."
        )
        raise DoesNotFitError(does_not_fit(f"{model.name} does not fit on {nodes} nodes", memory, remedy))
    return memory


def deployed_plan(inputs: Inputs) -> Strategy:
    """The plan by which the experts of a deployment lie."""
    system = inputs.scenario.system
    return plan_of_system(inputs, system.plan if system.uses_plan else "ep_balanced", inputs.trace)


def _systems(inputs: Inputs, strategy: Strategy) -> Iterator[SystemLayers]:
    """Layers of the scenario's system, then of its baseline where that is another run."""
    runs, _ = runs_of_size(inputs, strategy, inputs.scenario.workload.batch_tokens, Context(1.0, 1.0))
    names = [*runs]
    for name in dict.fromkeys((names[-1], names[0])):
        times = cache(partial(_layer_time, inputs, strategy, name))
        yield SystemLayers(name, times, runs[name].times_shared, partial(_layer_on, inputs, strategy, name))


def _layer_time(inputs: Inputs, strategy: Strategy, name: str, tokens: int, context: Context) -> LayerTime:
    """The mean layer of a run over iterations of so many tokens."""
    runs, iterations = runs_of_size(inputs, strategy, tokens, context)
    time = runs[name].rollout(iterations.batches).time
    return jax.tree.map(lambda leaf: np.mean(leaf, axis=(0, 1)), time)


def _layer_on(
    inputs: Inputs, strategy: Strategy, name: str, machine: Machine, tokens: int, context: Context
) -> LayerTime:
    """The mean layer of a run on another machine, which JAX may trace. Raises `UnsuitableSystemError`."""
    runs, iterations = runs_of_size(inputs, strategy, tokens, context)
    time = runs[name].timed(iterations.batches, machine)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32).mean(axis=(0, 1)), time)


def runs_of_size(
    inputs: Inputs, strategy: Strategy, tokens: int, context: Context
) -> tuple[dict[str, AbstractRun], IterationBatches]:
    """Runs of the scenario's system in steps of so many tokens, and its iterations."""
    workload = inputs.scenario.workload.model_copy(update={"batch_tokens": tokens})
    inputs = replace(inputs, scenario=inputs.scenario.model_copy(update={"workload": workload}))
    count = max(1, min(inputs.scenario.evaluation.iterations, MOST_TOKENS // tokens))
    iterations = iterations_of(inputs, count)
    setting = setting_of(inputs, strategy, iterations.history)
    setting = replace(setting, context_tokens=context.tokens, cached_tokens=context.cached)
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    return system.runs(setting), iterations
