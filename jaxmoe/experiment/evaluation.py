"""Strategies timed on the same batches, by the analytic model and in the event simulator."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.des import Fabric, LayerDescription, LayerReplay, Memory, replay_plan
from jaxmoe.des.exchanges import SIMULATED, choices_in_turn
from jaxmoe.engine import (
    AbstractServing,
    Layer,
    LayerCosts,
    LayerTime,
    Overlap,
    Serial,
    at_once,
    evaluate_soon,
    measured_time,
    serving_of,
)
from jaxmoe.engine.times import STAGES
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.hardware.kernels import AbstractGemm, Nodes, Parts, Seconds, Tokens, Witness
from jaxmoe.hardware.machine import Joules, added
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.exchange import EXCHANGES, Exchange, ExchangeError, exchange_of
from jaxmoe.placement.placement import Mode
from jaxmoe.threads import side_by_side
from jaxmoe.traces import Batch


def simulated_gemm(model: Layer) -> Witness | None:
    """Times of an expert's products for the event simulator, `None` where a die multiplies at its full rate."""
    gemm, costs = model.machine.die.gemm, model.costs
    if gemm is None:
        return None
    flops = np.asarray(model.machine.die.flops, float) / float(costs.flops_per_token_expert)  # experts of a token
    return gemm.witness(flops, float(costs.columns), float(costs.gemms)) or _own_times(gemm, flops, costs)


def unwitnessed(model: Layer) -> list[str]:
    """Notes on times that the event simulator takes from the model and so cannot check: products without a witness."""
    gemm = model.machine.die.gemm
    if gemm is None or gemm.witness(np.ones(model.machine.num_nodes), 1.0, 1.0) is not None:
        return []
    return [
        f"{type(gemm).__name__} states no times of its own for the simulator: its products take what the model says"
    ]


@eqx.filter_jit
def _node_seconds(
    gemm: AbstractGemm, given: Float[Array, "3 copy node"], rate: Float[Array, " node"], costs: LayerCosts
) -> Float[Array, " node"]:
    return gemm.node_seconds(given[0], given[1], given[2], rate, costs.columns, costs.gemms)


def _own_times(gemm: AbstractGemm, flops: Float[np.ndarray, " node"], costs: LayerCosts) -> Witness:
    """The model's own times: of all products of a node, which it spreads evenly over them."""
    nodes = len(flops)
    rate = jnp.asarray(flops, jnp.float32)

    def timed(node: Nodes, tokens: Tokens, part: Parts) -> Seconds:
        if type(gemm).node_seconds is AbstractGemm.node_seconds:  # products do not depend on each other
            rows, parts = (jnp.asarray(each, jnp.float32) for each in (tokens, part))
            each = gemm.seconds(rows, parts, jnp.ones_like(rows), rate[node], costs.columns, costs.gemms)
            return np.asarray(each, float)
        at = np.zeros(len(node), int)  # the place of a product among those of its node
        for index in range(nodes):
            at[node == index] = np.arange((node == index).sum())
        # In few sizes, so that one function is compiled: what is not present takes no time.
        given = np.zeros((3, 1 << int(max(at, default=0)).bit_length(), nodes), np.float32)
        given[:, at, node] = tokens, part, np.ones(len(node))
        total = _node_seconds(gemm, jnp.asarray(given), rate, costs)
        return np.asarray(total, float)[node] / np.bincount(node, minlength=nodes)[node]

    return timed


def score(
    inputs: Inputs, strategy: Strategy, batches: Batch, exchange: str | None = None, as_simulated: bool = False
) -> LayerTime:
    """Exact times of a strategy, [layer, batch]; busy times are means over batches.

    Every layer runs under its own exchange, or all under the one named, by the plan's prices if it takes any.
    `as_simulated` uses the schedule that the event simulator replays.
    """
    placement = strategy.placement
    model = replace(inputs.model, mode=placement.computed_mode)
    if as_simulated and not is_simulated(inputs):
        model = replace(model, schedule=Serial())
    exchanges = placement.exchanges(exchange)
    parts, order = [], []
    for described in dict.fromkeys(exchanges):
        rows = np.flatnonzero([described == other for other in exchanges])
        share, drawn = jnp.asarray(placement.computed[rows]), jax.tree.map(lambda leaf, at=rows: leaf[at], batches)
        serving = None if placement.copies is None else serving_of(placement.copies.rows(rows))
        if serving is None:
            drawn = model.merged(drawn, inputs.moe.num_experts, inputs.exchange(described))
        parts.append(_in_parts(model, share, drawn, inputs.exchange(described), serving))
        order.append(rows)
    back = np.argsort(np.concatenate(order))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *parts)


def _in_parts(
    model: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange,
    serving: AbstractServing | None,
) -> LayerTime:
    """Times on all batches, in even parts if there are any, by the program of one part, as tuning has it."""
    count, most = batches.weight.shape[1], at_once(share.shape[2])
    size = most if count % most == 0 else count
    parts = [batches.some(first, size) for first in range(0, count, size)]
    return LayerTime.joined([evaluate_soon(model, share, part, exchange, serving).as_numpy() for part in parts])


def is_simulated(inputs: Inputs) -> bool:
    """Whether the event simulator replays the scenario's schedule; `overlap`, a limit, it replays as `serial`."""
    return not isinstance(inputs.model.schedule, Overlap)


@dataclass(frozen=True)
class Replay:
    """Simulated times, [layer, batch] and busy resources as means over batches, with barriers between the stages.

    `free_running`: seconds without barriers.
    """

    time: LayerTime
    free_running: np.ndarray


def replay(
    inputs: Inputs,
    strategy: Strategy,
    batches: Batch,
    report: Callable[[int, int], None],
    known: dict[Hashable, list[LayerReplay]] | None = None,
) -> Replay:
    """Replay every batch of every layer; `report` is called with the layers done and those in all.

    A layer that is `known` from another strategy on these batches, as strategies often agree, is not replayed again.
    """
    known = {} if known is None else known
    placement, leaves = strategy.placement, jax.tree.map(np.asarray, batches)
    exchanges = placement.exchanges()
    layers = {each: describe(inputs, placement.computed_mode, each) for each in dict.fromkeys(exchanges)}

    def replayed(row: int) -> list[LayerReplay]:
        batch = jax.tree.map(lambda leaf: leaf[row : row + 1], leaves)
        shares = placement.computed[row : row + 1]
        if placement.copies is not None:
            return replay_plan(layers[exchanges[row]], shares, batch, copies=placement.copies.rows([row]))[0]
        key = row, placement.computed_mode, exchanges[row], shares.tobytes()
        if key not in known:
            known[key] = replay_plan(layers[exchanges[row]], shares, batch)[0]
        return known[key]

    rows = []
    for seen in side_by_side(replayed, range(len(exchanges))):  # the event loop leaves Python's lock
        rows.append(seen)
        report(len(rows), len(exchanges))
    free = np.array([[seen.free_running_s for seen in row] for row in rows])
    return Replay(_layer_time(rows, inputs.model.machine), free)


def describe(inputs: Inputs, mode: Mode, exchange: Exchange | str) -> LayerDescription:
    """The run's machine and layer in the event simulator's own terms, under an exchange or that of a name."""
    return describe_model(inputs.model, inputs.fabric, mode, exchange)


def describe_model(model: Layer, fabric: Fabric, mode: Mode, exchange: Exchange | str) -> LayerDescription:
    """Any layer model in the event simulator's own terms, on the network `fabric`; SI units, NumPy and floats.

    Raises `ExchangeError` for an exchange of which the simulator would leave out what it takes to decide.
    """
    machine, costs, deciding = model.machine, model.costs, model.costs.deciding
    exchange = exchange_of(exchange) if isinstance(exchange, str) else exchange
    _check_deciding(exchange.name)
    if deciding is not None:
        _check_in_turn(exchange, machine.topology)
    levels = ((level.bandwidth, level.latency, level.channel) for level in machine.memory)
    return LayerDescription(
        fabric=fabric,
        flops=np.asarray(machine.die.flops, float),
        dispatch_bytes=float(costs.dispatch_bytes),
        combine_bytes=float(costs.combine_bytes),
        expert_bytes=float(costs.expert_bytes),
        flops_per_token_expert=float(costs.flops_per_token_expert),
        mode=mode,
        exchange=exchange,
        memory=tuple(Memory(*map(np.asarray, level)) for level in levels),
        gemm=simulated_gemm(model),
        micro_batches=model.schedule.micro_batches,
        choice_seconds=0.0 if deciding is None else float(deciding.choice_seconds),
        told_bytes=0.0 if deciding is None else float(deciding.told_bytes),
        overlap=machine.die.overlap,
    )


def _check_in_turn(exchange: Exchange, topology: AbstractTopology) -> None:
    knows = build_exchange(exchange, topology).knows
    if knows == "batch" and choices_in_turn(exchange, 1) is None:
        raise ExchangeError(
            f"exchange {exchange.name} has to know the batch, which costs.deciding charges, but not the simulator; "
            "give the function that carries it out the attribute `choices_in_turn`, or state that the exchange `knows` "
            "nothing"
        )


def _check_deciding(exchange: str) -> None:
    if exchange not in EXCHANGES or exchange not in SIMULATED:
        return  # refused by name elsewhere
    decides = getattr(EXCHANGES[exchange], "deciding", AbstractExchange.deciding)
    if decides is not AbstractExchange.deciding and not hasattr(SIMULATED[exchange], "deciding"):
        raise ExchangeError(
            f"exchange {exchange} takes traffic to decide, which the simulator would leave out; give the function that "
            "carries it out the attribute `deciding`"
        )


def _layer_time(rows: list[list[LayerReplay]], machine: Machine) -> LayerTime:
    """Replays [layer][batch] as arrays, with the energy of what the simulator has counted."""

    def each(value: Callable[[LayerReplay], Any]) -> np.ndarray:
        return np.array([[value(seen) for seen in row] for row in rows], float)

    def of_stage(name: str) -> np.ndarray:
        return each(lambda seen: seen.stages[name])

    def links(name: str) -> dict[str, np.ndarray]:
        return {"link": each(lambda seen: seen.link_busy[name]).mean(axis=1)}

    nodes = {"node": each(lambda seen: seen.node_busy).mean(axis=1)}
    stages: dict[str, Any] = {name: of_stage(name) for name in STAGES}
    busy: dict[str, Any] = {"dispatch": links("dispatch"), "compute": nodes, "combine": links("combine")}
    energy = [[_energy(machine, seen) for seen in row] for row in rows]
    parts = {name: np.array([[each[name] for each in row] for row in energy]) for name in energy[0][0]}
    return measured_time(stages, busy, each(lambda seen: seen.total_s), parts)


def _energy(machine: Machine, seen: LayerReplay) -> Joules:
    """Energy of what the simulator has counted, J."""
    if machine.energy is None:
        return {}
    known = jax.tree.map(lambda leaf: np.asarray(leaf, float), machine.energy)
    moved = [(level.name, moved) for level, moved in zip(machine.memory, seen.memory_bytes, strict=True)]
    idle = known.of_time(np.asarray(seen.total_s), machine.num_nodes)
    return added([known.of_links(seen.link_bytes), known.of_nodes(seen.flops, moved), idle])
