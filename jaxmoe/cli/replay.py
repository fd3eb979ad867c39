"""Strategies replayed in the event simulator."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.strategies import Rings, Strategy
from jaxmoe.des import Fabric, LayerDescription, LayerReplay, Memory, fabric_of, replay_plan
from jaxmoe.hardware import Machine
from jaxmoe.hardware.mesh import blocks
from jaxmoe.placement import exchange as exchanges
from jaxmoe.placement.exchange import Exchange, Gather
from jaxmoe.placement.placement import Mode
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class Replay:
    """Simulated seconds of every layer and batch, [layer, batch]. `free_running`: without barriers."""

    dispatch: np.ndarray
    compute: np.ndarray
    combine: np.ndarray
    total: np.ndarray
    free_running: np.ndarray

    @property
    def communication(self) -> np.ndarray:
        return self.dispatch + self.combine


def replay(inputs: Inputs, strategy: Strategy, batches: Batch, report: Callable[[int, int], None]) -> Replay:
    """Replay every batch of every layer; `report` is called with the layers done and those in all."""
    leaves, rows = jax.tree.map(np.asarray, batches), []
    gathering = describe(inputs, strategy.placement.mode)  # it holds the paths, which all layers share
    for row, rings in enumerate(strategy.rings):
        layer = dataclasses.replace(gathering, exchange=_exchange(inputs, rings))
        batch = jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], leaves)
        rows.append(replay_plan(layer, strategy.placement.share[row : row + 1], batch)[0])
        report(row + 1, len(strategy.rings))

    def seconds(of: Callable[[LayerReplay], float]) -> np.ndarray:
        return np.array([[of(seen) for seen in row] for row in rows])

    return Replay(
        dispatch=seconds(lambda seen: seen.stages["dispatch"]),
        compute=seconds(lambda seen: seen.stages["compute"]),
        combine=seconds(lambda seen: seen.stages["combine"]),
        total=seconds(lambda seen: seen.total_s),
        free_running=seconds(lambda seen: seen.free_running_s),
    )


def describe(inputs: Inputs, mode: Mode, rings: Rings | None = None) -> LayerDescription:
    """The machine and the layer in the simulator's own terms."""
    model = inputs.model
    return LayerDescription(
        fabric=_fabric(inputs),
        flops=np.asarray(model.machine.die.flops),
        memory=memory_of(model.machine),
        dispatch_bytes=float(model.message_bytes),
        combine_bytes=float(model.message_bytes),
        expert_bytes=float(model.expert_bytes),
        flops_per_token_expert=float(model.flops_per_token_expert),
        mode=mode,
        exchange=_exchange(inputs, rings),
    )


def memory_of(machine: Machine) -> tuple[Memory, ...]:
    """The machine's memory in the simulator's own terms."""
    return tuple(
        Memory(np.asarray(level.bandwidth), np.asarray(level.latency), np.asarray(level.channel))
        for level in machine.memory
    )


def _exchange(inputs: Inputs, rings: Rings | None) -> Exchange:
    if rings is None:
        return Gather(inputs.scenario.costs.gather)
    along_x = len(np.unique(blocks(inputs.shape, rings.count).reshape(inputs.shape)[:, 0]))
    groups = (along_x, rings.count // along_x)
    return exchanges.Rings(groups, rings.both_ways, between=False)  # as hd_moe's published times


def _fabric(inputs: Inputs) -> Fabric:
    router = inputs.scenario.hardware.router
    chunk = None if router.chunk_B is None else float(router.chunk_B)
    return fabric_of(inputs.model.machine.topology, chunk, router.switching == "cut_through")
