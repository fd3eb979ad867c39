"""Strategies timed on the same batches: by the analytic model, exactly, and in the event simulator."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.des import Fabric, LayerDescription, fabric_of, replay_plan
from jaxmoe.des.schedules import block_rings as simulated_rings
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Rings, Strategy
from jaxmoe.latency import judge
from jaxmoe.network import AbstractExchange, block_rings
from jaxmoe.placement.placement import Mode
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class Score:
    """Seconds of every layer and batch [layer, batch], and how busy nodes and links are on average."""

    dispatch: np.ndarray
    compute: np.ndarray
    combine: np.ndarray
    total: np.ndarray
    node_time: np.ndarray  # [layer, node]
    dispatch_link_time: np.ndarray  # [layer, link]
    combine_link_time: np.ndarray

    @property
    def communication(self) -> np.ndarray:
        return self.dispatch + self.combine

    @property
    def p95_total(self) -> np.ndarray:
        """95th percentile over batches, s [layer]."""
        return np.quantile(self.total, 0.95, axis=1)

    @property
    def layer_total(self) -> np.ndarray:
        """Mean over batches, s [layer]."""
        return self.total.mean(axis=1)

    @property
    def link_time(self) -> np.ndarray:
        """What links carry in dispatch and combine together, s [layer, link]."""
        return self.dispatch_link_time + self.combine_link_time

    def first_batches(self, count: int) -> "Score":
        """Times of the first batches; node and link times stay means over all of them."""
        times = {name: getattr(self, name)[:, :count] for name in ("dispatch", "compute", "combine", "total")}
        return replace(self, **times)


def score(inputs: Inputs, strategy: Strategy, batches: Batch, gather: AbstractExchange | None = None) -> Score:
    """Judge a strategy; `gather` replaces the scenario's own rule where results gather."""
    rings = strategy.rings
    parts = {count: _score_all(inputs, strategy, batches, count, gather) for count in dict.fromkeys(rings)}
    return Score(
        **{
            name: np.stack([getattr(parts[count], name)[row] for row, count in enumerate(rings)])
            for name in (field.name for field in fields(Score))
        }
    )


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
        rings=None if rings is None else simulated_rings(inputs.shape, rings.count),
        both_ways=rings is not None and rings.both_ways,
    )


def _score_all(
    inputs: Inputs, strategy: Strategy, batches: Batch, rings: Rings | None, gather: AbstractExchange | None
) -> Score:
    """Every layer scored with the same exchange: few shapes to compile for."""
    model = replace(inputs.model, mode=strategy.placement.mode)
    exchange = gather if rings is None else block_rings(inputs.shape, rings.count, rings.both_ways)
    seen = judge(model, jnp.asarray(strategy.placement.share), batches, exchange)
    return Score(**{field.name: np.asarray(getattr(seen, field.name), float) for field in fields(Score)})


def _fabric(inputs: Inputs) -> Fabric:
    router = inputs.scenario.hardware.router
    chunk = None if router.chunk_B is None else float(router.chunk_B)
    return fabric_of(inputs.model.machine.topology, chunk, router.switching == "cut_through")
