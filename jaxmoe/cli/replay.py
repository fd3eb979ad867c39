"""Strategies replayed in the event simulator."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.strategies import Strategy
from jaxmoe.des import LayerDescription, replay_plan
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


def why_no_replay(inputs: Inputs) -> str | None:
    """The reason and the remedy where the simulator has no such machine."""
    if inputs.scenario.costs.chunk_B == 0:
        return (
            "costs.chunk_B is 0, cut-through, but the event simulator stores and forwards chunks; "
            "set costs.chunk_B to a chunk size in B, for example --set costs.chunk_B=4096"
        )
    ports = inputs.scenario.hardware.ports
    if ports.injection_GB_per_s is not None or ports.ejection_GB_per_s is not None:
        return (
            "hardware.ports limits what a node can send or receive, but the event simulator has no such limits; "
            "set hardware.ports.injection_GB_per_s and hardware.ports.ejection_GB_per_s to null"
        )
    return None


def replay(inputs: Inputs, strategy: Strategy, batches: Batch, report: Callable[[int, int], None]) -> Replay:
    """Replay every batch of every layer; `report` is called with the layers done and those in all."""
    leaves, rows = jax.tree.map(np.asarray, batches), []
    for row, rings in enumerate(strategy.rings):
        layer = _describe(inputs, strategy, rings)
        batch = jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], leaves)
        rows.append(replay_plan(layer, strategy.placement.share[row : row + 1], batch)[0])
        report(row + 1, len(strategy.rings))

    def seconds(name: str) -> np.ndarray:
        return np.array([[getattr(seen, name) for seen in row] for row in rows])

    return Replay(*(seconds(name) for name in ("dispatch_s", "compute_s", "combine_s", "total_s", "free_running_s")))


def _describe(inputs: Inputs, strategy: Strategy, rings: int | None) -> LayerDescription:
    """The machine and the layer in the simulator's own terms."""
    model, mesh, die = inputs.model, inputs.model.platform.mesh, inputs.model.platform.die
    return LayerDescription(
        shape=mesh.shape,
        link_bandwidth=np.asarray(mesh.link_bandwidth),
        link_latency=np.asarray(mesh.link_latency),
        flops=np.asarray(die.flops),
        memory_bandwidth=None if die.memory_bandwidth is None else np.asarray(die.memory_bandwidth),
        message_bytes=float(model.message_bytes),
        expert_bytes=float(model.expert_bytes),
        flops_per_token_expert=float(model.flops_per_token_expert),
        chunk_bytes=float(model.chunk_bytes),
        mode=strategy.placement.mode,
        gather=inputs.scenario.costs.gather,
        rings=rings,
    )
