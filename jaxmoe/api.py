"""The door: layers, machines and runs by short names, with shapes checked for those who write them.

import jaxmoe as jm

mesh = jm.mesh((4, 8), bandwidth=50e9, latency=1e-7)
layer = jm.layer(jm.machine(mesh, flops=5e12), jm.model("mixtral-8x7b"), exchange="least_loaded")
time = jm.evaluate(layer, jm.expert_parallel(trace, mesh), batches)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmoe import engine
from jaxmoe.config import build_model
from jaxmoe.config.loader import load_model
from jaxmoe.des import fabric_of
from jaxmoe.engine import AbstractLayer, AbstractMethod, Decisions, Layer, LayerCosts, LayerTime
from jaxmoe.engine.schedule import schedule_of
from jaxmoe.errors import InputError
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.hardware import AbstractGemm, AbstractTopology, Die, Energy, Machine, MemoryLevel, Mesh, node_memory
from jaxmoe.hardware.topology import filled
from jaxmoe.methods.static import replayed_movements, replayed_stages
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, AbstractTimeModel, Congestion, build_exchange
from jaxmoe.placement.copies import Copies
from jaxmoe.placement.named import StrategySettings, strategy_named
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch, GatingTrace, load_counts

Number = int | float | Float[Array, ""]
# What one subclasses to add a part.
Topology, Exchange, Method, KernelModel = AbstractTopology, AbstractExchange, AbstractMethod, AbstractGemm


class ArgumentError(InputError):
    """An argument of the wrong shape or kind; the message names it, its axes, and what to give instead."""


# Makers.


def mesh(shape: tuple[int, int], bandwidth: Number, latency: Number = 0.0, routing: Literal["xy", "yx"] = "xy") -> Mesh:
    """A mesh of X x Y nodes, node (x, y) numbered x * Y + y; B/s and s of one direction of a link."""
    sides = tuple(shape) if isinstance(shape, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ArgumentError(f"shape is {shape!r}, expected two whole numbers above 0, rows and columns, such as (4, 8)")
    return Mesh.uniform(_positive("bandwidth", bandwidth), latency, shape=sides, routing=routing)


def machine(
    topology: AbstractTopology,
    flops: Number | Float[Array, " node"],
    memory_bandwidth: Number | None = None,
    memory_capacity: Number | None = None,
    *,
    memory: tuple[MemoryLevel, ...] = (),
    gemm: AbstractGemm | None = None,
    energy: Energy | None = None,
) -> Machine:
    """A machine of equal dies: FLOP/s of a node, and B/s and B of a memory of its own, or any levels of `memory`."""
    if not isinstance(topology, AbstractTopology):
        raise ArgumentError(
            f"topology is a {type(topology).__name__}, expected a Topology, such as jm.mesh((4, 8), 50e9)"
        )
    nodes = topology.num_nodes
    rate = _positive("flops", flops)
    if np.ndim(rate) and np.shape(rate) != (nodes,):
        raise ArgumentError(f"flops has the shape {np.shape(rate)}, expected one number, or [node] of {nodes} nodes")
    if memory and (memory_bandwidth is not None or memory_capacity is not None):
        raise ArgumentError(
            "memory is given beside memory_bandwidth or memory_capacity; give levels or numbers, not both"
        )
    each = jnp.asarray(rate, jnp.float32) if np.ndim(rate) else filled(nodes, cast(Number, rate))
    rate_of_memory, room = (
        None if value is None else filled(nodes, value) for value in (memory_bandwidth, memory_capacity)
    )
    return Machine(topology, Die(each, gemm), memory or node_memory(rate_of_memory, room), energy)


def model(name: str | Path) -> MoEModel:
    """A model by its name among those shipped, or by the path of its YAML file or Hugging Face `config.json`."""
    return build_model(load_model(str(name), "model"))


def layer(
    machine: Machine,
    model: MoEModel,
    exchange: str | AbstractExchange = "lowest_host",
    *,
    mode: Literal["sharded", "replicated"] = "sharded",
    schedule: str = "serial",
    bytes_per_element: Number | None = None,
    weight_bytes_per_element: Number | None = None,
    chunk_bytes: Number = 0.0,
    cut_through: bool = False,
    time_model: AbstractTimeModel | None = None,
) -> Layer:
    """One MoE layer of a model on a machine.

    Activations and weights have so many bytes each, by default those of `model.bytes`. `exchange` is a name or an
    exchange of your own; messages are stored and forwarded in chunks, whole where `chunk_bytes` is 0, or `cut_through`.
    """
    if not isinstance(machine, Machine):
        raise ArgumentError(f"machine is a {type(machine).__name__}, expected what jm.machine(topology, flops) makes")
    if not isinstance(model, MoEModel):
        raise ArgumentError(f"model is a {type(model).__name__}, expected what jm.model('mixtral-8x7b') makes")
    if mode not in ("sharded", "replicated"):
        raise ArgumentError(f"mode is {mode!r}, expected 'sharded' or 'replicated'")
    activation = model.bytes.activations if bytes_per_element is None else bytes_per_element
    costs = LayerCosts.of(
        model,
        dispatch_bytes_per_element=activation,
        combine_bytes_per_element=activation,
        weight_bytes_per_element=model.bytes.experts if weight_bytes_per_element is None else weight_bytes_per_element,
    )
    times = Congestion(jnp.asarray(chunk_bytes, jnp.float32), cut_through) if time_model is None else time_model
    built = build_exchange(exchange, machine.topology) if isinstance(exchange, str) else exchange
    return Layer(machine, costs, times, built, mode, schedule_of(schedule))


def place(
    strategy: str, trace: GatingTrace, topology: AbstractTopology, *, seed: int = 0, regions: int = 2
) -> Float[Array, "layer expert node"]:
    """Shares by the name of a placement strategy, from how often experts are chosen in a trace.

    Raises `ArgumentError` for a strategy with copies of experts, which has more than shares.
    """
    counts = load_counts(trace).counts[0]
    share = strategy_named(strategy).share(counts, topology, StrategySettings(seed, regions))
    if isinstance(share, Copies):
        raise ArgumentError(
            f"strategy is {strategy!r}, which has copies of experts, and so no shares of experts; make the copies with "
            "jaxmoe.placement.regions.region_copies, and time them with jaxmoe.engine.evaluate"
        )
    return jnp.asarray(share, jnp.float32)


def expert_parallel(trace: GatingTrace, topology: AbstractTopology) -> Float[Array, "layer expert node"]:
    """Whole experts, one node each, dealt by load so that busy ones lie apart."""
    return place("ep", trace, topology)


def tensor_parallel(trace: GatingTrace, topology: AbstractTopology) -> Float[Array, "layer expert node"]:
    """Every expert divided evenly over all nodes."""
    return place("tp", trace, topology)


# Evaluation.


def evaluate(
    layer: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: str | AbstractExchange | None = None,
    *,
    smooth: Number | None = None,
) -> LayerTime:
    """Seconds of every layer and batch, leaves [layer, batch], and busy seconds, means over batches.

    `share` is [layer, expert, node], `batches` as `jm.sample_batches` draws them. Exact, or with `smooth`, a
    temperature such as 0.02, relaxed: maxima and presence of shares have slopes everywhere, and the value tends to the
    exact one as it goes to 0. Raises `ArgumentError` for shapes that do not go together.
    """
    _check_share(layer, share, batches)
    used = build_exchange(exchange, layer.machine.topology) if isinstance(exchange, str) else exchange
    if smooth is None:
        return engine.evaluate(layer, share, batches, used)
    width = jnp.asarray(_positive("smooth", smooth), jnp.float32)
    return engine.evaluate(layer, share, batches, used, None, SmoothMax(width), SoftSupport(width))


def _check_share(layer: Layer, share: Any, batches: Batch) -> None:
    """Raise `ArgumentError` where a share does not fit the layer's machine, or batches the share."""
    if not isinstance(layer, Layer):
        raise ArgumentError(f"layer is a {type(layer).__name__}, expected what jm.layer(machine, model) makes")
    nodes, shape = layer.machine.num_nodes, np.shape(share)
    if len(shape) != 3:
        raise ArgumentError(
            f"share has {len(shape)} axes, {list(shape)}, expected [layer, expert, node]; of one layer give share[None]"
        )
    if shape[2] != nodes:
        raise ArgumentError(f"share has {shape[2]} nodes on its axis node, but the machine has {nodes}")
    if not jnp.issubdtype(jnp.asarray(share).dtype, jnp.floating):
        raise ArgumentError(f"share is of {jnp.asarray(share).dtype}, expected floats, parts of experts from 0 to 1")
    if not isinstance(batches, Batch):
        raise ArgumentError(
            f"batches is a {type(batches).__name__}, expected what jm.sample_batches draws from a trace"
        )
    if batches.weight.ndim != 3:
        raise ArgumentError(
            f"batches have the axes {list(batches.weight.shape)}, expected [layer, batch, token]; draw them with "
            "jm.sample_batches(trace, tokens, count, seed)"
        )
    if batches.weight.shape[0] != shape[0]:
        raise ArgumentError(
            f"share has {shape[0]} layers on its axis layer, but batches have {batches.weight.shape[0]}"
        )
    _check_values(share, batches, shape[1])


def _check_values(share: Any, batches: Batch, experts: int) -> None:
    """Raise `ArgumentError` for rows that do not sum to 1, or choices of experts that the share lacks.

    Values that JAX traces cannot be looked at.
    """
    if isinstance(share, jax.core.Tracer) or isinstance(batches.experts, jax.core.Tracer):
        return
    rows = np.asarray(share).sum(axis=-1)
    for at in np.argwhere(~(np.abs(rows - 1) <= 1e-3))[:1]:
        raise ArgumentError(
            f"share sums to {rows[tuple(at)]:g} over nodes for expert {at[1]} of layer {at[0]}, expected 1; "
            "divide it by share.sum(axis=-1, keepdims=True)"
        )
    if np.asarray(share).min(initial=0) < 0:
        raise ArgumentError(f"share has {np.asarray(share).min():g}, expected parts from 0 to 1")
    most = int(np.asarray(batches.experts).max(initial=-1))
    if most >= experts:
        raise ArgumentError(f"batches choose expert {most}, but share has {experts} experts; use a trace of the model")


# Runs of methods.


@dataclass(frozen=True)
class Run:
    """A method over steps: its times [step, layer], what it decided [step, layer, ...], and the steps themselves."""

    layer: AbstractLayer
    method: AbstractMethod
    steps: Batch
    time: LayerTime
    decisions: PyTree
    state: PyTree
    options: Mapping[str, Any]  # of the rollout


def rollout(method: AbstractMethod, layer: AbstractLayer, steps: Batch, **options: Any) -> Run:
    """Run a method over steps, leaves [layer, step, ...]: it decides, is timed, sees the times, and decides again.

    Options are those of `jaxmoe.engine.rollout`.
    """
    if not isinstance(method, AbstractMethod):
        raise ArgumentError(f"method is a {type(method).__name__}, expected a Method with init and step")
    if not isinstance(steps, Batch):
        raise ArgumentError(f"steps is a {type(steps).__name__}, expected what jm.sample_batches draws from a trace")
    if steps.weight.ndim != 3:
        raise ArgumentError(f"steps have the axes {list(steps.weight.shape)}, expected [layer, step, token]")
    done = engine.rollout(method, layer, steps, **options)
    return Run(layer, method, steps, done.time, done.kept, done.state, options)


@dataclass(frozen=True)
class Replayed:
    """Seconds of every layer of a step in the event simulator, and of weights that travel apart, [layer]."""

    seconds: Float[np.ndarray, " layer"]
    movement: Float[np.ndarray, " layer"]


def replay(run: Run, step: int, progress: Callable[[int, int], None] | None = None) -> Replayed:
    """Carry out a step of a run in the event simulator, message by message, from its decisions alone.

    Stages follow each other with barriers. Raises `ArgumentError` for runs whose layers or decisions are not those of
    tokens that go to experts.
    """
    if not isinstance(run.layer, Layer) or not isinstance(run.decisions, Decisions):
        raise ArgumentError(
            f"a {type(run.decisions).__name__} on a {type(run.layer).__name__} is not replayed from here; "
            "use jaxmoe simulate, whose systems replay themselves"
        )
    if run.options:
        raise ArgumentError(
            f"the run has the options {', '.join(run.options)}, with which nothing is replayed from here; "
            "roll out without them, on a layer of that exchange"
        )
    layers, steps = run.steps.weight.shape[:2]
    if not -steps <= step < steps:
        raise ArgumentError(f"step is {step}, expected one of the {steps} of the run")
    fabric = fabric_of(
        run.layer.machine.topology, _chunk(run.layer.time_model), getattr(run.layer.time_model, "cut_through", False)
    )
    seconds, movement = np.zeros(layers), np.zeros(layers)
    for row in range(layers):
        decided: Decisions = jax.tree.map(lambda leaf, at=row: np.asarray(leaf[step, at]), run.decisions)
        batch = jax.tree.map(lambda leaf, at=row: np.asarray(leaf[at, step]), run.steps)
        exchange = run.layer.exchange if decided.exchange is None else decided.exchange
        described = describe_model(run.layer, fabric, run.layer.mode, exchange.described)
        seconds[row] = replayed_stages(described, decided, batch)
        movement[row] = replayed_movements(described, decided)
        if progress is not None:
            progress(row + 1, layers)
    return Replayed(seconds, movement)


def _chunk(time_model: AbstractTimeModel) -> float | None:
    chunk = float(getattr(time_model, "chunk_bytes", 0.0))
    return chunk or None


def _positive(name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return value
    numbers = np.asarray(value)
    if numbers.dtype.kind in "SUO" or not (numbers > 0).all():
        raise ArgumentError(f"{name} is {value!r}, expected a number above 0")
    return value
