"""Strategies replayed in the event simulator."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.strategies import Rings, Strategy
from jaxmoe.des import Fabric, LayerDescription, fabric_of, replay_plan
from jaxmoe.des.schedules import block_rings
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
    for row, rings in enumerate(strategy.rings):
        layer = describe(inputs, strategy.placement.mode, rings)
        batch = jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], leaves)
        rows.append(replay_plan(layer, strategy.placement.share[row : row + 1], batch)[0])
        report(row + 1, len(strategy.rings))

    def seconds(name: str) -> np.ndarray:
        return np.array([[getattr(seen, name) for seen in row] for row in rows])

    return Replay(*(seconds(name) for name in ("dispatch_s", "compute_s", "combine_s", "total_s", "free_running_s")))


def describe(inputs: Inputs, mode: Mode, rings: Rings | None = None) -> LayerDescription:
    """The machine and the layer in the simulator's own terms."""
    model, die, memory = inputs.model, inputs.model.machine.die, inputs.model.machine.memory
    return LayerDescription(
        fabric=_fabric(inputs),
        flops=np.asarray(die.flops),
        memory_bandwidth=None if not memory else np.asarray(memory[0].bandwidth),
        message_bytes=float(model.message_bytes),
        expert_bytes=float(model.expert_bytes),
        flops_per_token_expert=float(model.flops_per_token_expert),
        mode=mode,
        gather=inputs.scenario.costs.gather,
        rings=None if rings is None else block_rings(inputs.shape, rings.count),
        both_ways=rings is not None and rings.both_ways,
    )


def _fabric(inputs: Inputs) -> Fabric:
    router = inputs.scenario.hardware.router
    chunk = None if router.chunk_B is None else float(router.chunk_B)
    return fabric_of(inputs.model.machine.topology, chunk, router.switching == "cut_through")
