"""Several layers in one simulation, stage after stage, and weights that migrate meanwhile (moentwine V-A).

A layer has attention, its all-reduce, dispatch, experts and combine, with a barrier over all nodes after each. Where it
is cut into micro-batches, the network serves one phase at a time while nodes compute another micro-batch. Weights
travel in the background of all that, or inference waits for them, or they compete with it as any other message does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import LayerDescription, node_seconds, plan_tokens, with_memory
from jaxmoe.des.event_loop import SimulatedRun, run_on
from jaxmoe.des.fabric import Fabric, FabricPaths, Rows, one_each
from jaxmoe.des.tasks import GraphBuilder, Transfers, add_transfers, messages, no_rows
from jaxmoe.des.token_communication import exchange_traffic, reduce_steps
from jaxmoe.des.traffic import messages_of
from jaxmoe.placement.slots import EMPTY
from jaxmoe.placement.token_layout import TokenLayout
from jaxmoe.traces import Batch

Migration = Literal["background", "waited_for", "beside"]


@dataclass(frozen=True)
class Phase:
    """A stage of a layer: messages in parts, one after the other, or what every node computes, s.

    Phases of a `block` follow each other; a block begins when the one before has ended for all micro-batches.
    """

    name: str
    parts: tuple[Transfers, ...] = ()
    seconds: Float[np.ndarray, " node"] = field(default_factory=lambda: np.zeros(0))
    block: str = "experts"


@dataclass(frozen=True)
class StreamRun:
    """A simulation with the stage of every task; when every layer is done, and all weights are there, s."""

    run: SimulatedRun
    stage: list[str]
    layer_ends: Float[np.ndarray, " layer"]
    weights_end: float


def run_layers(
    fabric: Fabric,
    layers: Sequence[Sequence[Phase]],
    weights: Transfers | None = None,
    migration: Migration = "background",
    record: bool = False,
    micro_batches: int = 1,
) -> StreamRun:
    """Simulate layers one after the other, with weights on their way from the start.

    Each of so many micro-batches has an equal part of every phase.
    """
    tasks, background = _LayerTasks(fabric, micro_batches), migration == "background"
    start = ready = no_rows(fabric.num_nodes)
    ends: list[int] = []
    arrived = None
    if weights is not None and not background:
        arrived = tasks.migrated(weights, start, behind=False)
        ready = arrived if migration == "waited_for" else start
    for layer in layers:
        for _, phases in groupby(layer, lambda phase: phase.block):
            ready = tasks.block(list(phases), ready)
        ends.append(int(ready.items[0]))
    if weights is not None and background:  # from the start on, not after the layers
        arrived = tasks.migrated(weights, start, behind=True)
    run = run_on(replace(fabric, burst=None), tasks.graph.build(), record)
    there = 0.0 if arrived is None else float(run.finish[int(arrived.items[0])])
    return StreamRun(run, tasks.stage, run.finish[ends], there)


class _LayerTasks:
    """Tasks of layers, with the stage of each. Every method returns the tasks after which nodes may go on."""

    def __init__(self, fabric: Fabric, micro_batches: int) -> None:
        self.graph = GraphBuilder(len(fabric.rate), fabric.num_nodes, fabric.chunk_bytes)
        self.stage: list[str] = []
        self._nodes, self._many = np.arange(fabric.num_nodes), micro_batches

    def migrated(self, weights: Transfers, ready: Rows, behind: bool) -> Rows:
        """Weights that travel, `behind` all else where they use idle links alone."""
        return self._barrier("migration", ready, add_transfers(self.graph, weights, ready, behind))

    def block(self, phases: list[Phase], ready: Rows) -> Rows:
        """All micro-batches of a block: the network serves one phase at a time, while nodes compute another part.

        Raises `ValueError` for a block that has not one phase of nodes.
        """
        places = [place for place, phase in enumerate(phases) if len(phase.seconds)]
        if len(places) != 1 or phases[places[0]].parts:
            names = ", ".join(phase.name for phase in phases)
            raise ValueError(f"a block has the phases {names}; give it one in which nodes compute and nothing is sent")
        (at,) = places
        before, node, after = phases[:at], phases[at], phases[at + 1 :]
        network, computed, waiting = ready, ready, list[Rows]()
        for _ in range(self._many):
            network = self._sent(before, network)
            begin = network if computed is ready else self._barrier(node.name, network, computed)
            work = self.graph.computations(self._nodes, node.seconds / self._many, begin)
            computed = self._barrier(node.name, one_each(work))
            waiting.append(computed)
            if len(waiting) > 1:
                network = self._sent(after, self._barrier(node.name, network, waiting.pop(0)))
        last = computed if self._many == 1 else self._barrier(node.name, network, computed)
        return self._sent(after, last)

    def _sent(self, phases: Sequence[Phase], ready: Rows) -> Rows:
        for phase in phases:
            for part in phase.parts:
                cut = replace(part, size=part.size / self._many)
                ready = self._barrier(phase.name, ready, add_transfers(self.graph, cut, ready))
        return ready

    def _barrier(self, name: str, *waits: Rows) -> Rows:
        done = self.graph.barrier(np.concatenate([each.items for each in waits]))
        self.stage.extend([name] * (self.graph.num_tasks - len(self.stage)))
        return one_each(np.full(len(self._nodes), done))


def weight_transfers(
    fabric: Fabric,
    source: Int[np.ndarray, " move"],
    destination: Int[np.ndarray, " move"],
    size: float,
) -> Transfers:
    """Transfers of experts of `size` B each, from every source to its destination."""
    return messages(fabric.paths, source, destination, np.full(len(source), size))


# A layer token by token.


def token_layer(
    layer: LayerDescription,
    layout: TokenLayout,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    group: Int[np.ndarray, " token"],
    attention: Float[np.ndarray, " node"],
) -> list[Phase]:
    """The phases of a layer token by token: `group` is that of every token, `attention` the seconds of every node."""
    plan = plan_tokens(layer, share, batch)
    traffic = exchange_traffic(layer.fabric, layout, plan.visited, group)
    reduced = len(group) / layout.num_groups * layer.combine_bytes
    return phases(layer, layout, traffic, attention, node_seconds(layer, plan, batch), reduced)


def phases(
    layer: LayerDescription,
    layout: TokenLayout,
    traffic: Sequence[Float[np.ndarray, "node node2"]],
    attention: Float[np.ndarray, " node"],
    computing: Float[np.ndarray, " node"],
    reduced_bytes: float,
) -> list[Phase]:
    """All phases in order; `traffic` is that of combine in vectors, part by part, and dispatch its mirror."""
    fabric = layer.fabric

    def sent(traffic: Float[np.ndarray, "node node2"], paths: FabricPaths) -> Transfers:
        return messages(paths, *messages_of(traffic, "in_turns", fabric.chunk_bytes))

    reduced = tuple(sent(step, fabric.paths) for step in reduce_steps(layout, reduced_bytes))
    return [
        Phase("attention", seconds=attention, block="attention"),
        Phase("all_reduce", reduced, block="attention"),
        Phase("dispatch", tuple(sent((each * layer.dispatch_bytes).T, fabric.mirrored) for each in traffic[::-1])),
        Phase("compute", seconds=computing),
        Phase("combine", tuple(sent(each * layer.combine_bytes, fabric.paths) for each in traffic)),
    ]


def moves(
    before: Int[np.ndarray, "node slot"],
    after: Int[np.ndarray, "node slot"],
    hops: Int[np.ndarray, "node node2"],
) -> Iterator[tuple[int, int]]:
    """Yield source and destination of every expert that moves when slots change.

    The source is the nearest node that held the expert before.
    """
    for node, held in enumerate(after.tolist()):
        for expert in dict.fromkeys(held):
            if expert == EMPTY or expert in before[node]:
                continue
            hosts = np.flatnonzero((before == expert).any(axis=1))
            yield int(hosts[hops[hosts, node].argmin()]), node


def most_moves(
    before: Int[np.ndarray, "step layer node slot"],
    after: Int[np.ndarray, "step layer node slot"],
    hops: Int[np.ndarray, "node node2"],
    layers: int,
) -> tuple[int, range, Int[np.ndarray, "move 2"]]:
    """Step and successive layers in which most slots change, and source and destination of every expert moved."""
    changed = np.lib.stride_tricks.sliding_window_view((after != before).sum(axis=(2, 3)), layers, axis=1).sum(axis=2)
    step, first = (int(index) for index in np.unravel_index(changed.argmax(), changed.shape))
    rows = range(first, first + layers)
    pairs = [pair for row in rows for pair in moves(before[step, row], after[step, row], hops)]
    return step, rows, np.array(pairs, int).reshape(-1, 2)


# Attention in equal groups of nodes: every node works for the tokens of its own group.


@dataclass(frozen=True)
class AttentionDescription:
    """Attention costs of a node: FLOPs and bytes for every token of its group, and bytes of weights for every step.

    `group` names the group of every node. Costs are those of one node, its share in a tensor-parallel group.
    """

    group: Int[np.ndarray, " node"]
    flops_per_token: float
    weight_bytes: float
    context_bytes: float  # of keys and values, for a token
    vector_bytes: float


def attention_seconds(
    layer: LayerDescription, attention: AttentionDescription, group: Int[np.ndarray, " token"]
) -> float:
    """Attention time of the slowest node, s, for tokens that belong to the groups `group`.

    Weights, keys and values pass every level of memory, hidden vectors the first level alone.
    """
    tokens = np.bincount(group, minlength=attention.group.max() + 1)[attention.group]
    read = attention.weight_bytes + tokens * attention.context_bytes
    vectors = tokens * 2 * attention.vector_bytes
    moved = [read if depth else read + vectors for depth, _ in enumerate(layer.memory)]
    each = np.array(moved, float).reshape(len(moved), layer.num_nodes)
    return float(with_memory(layer, tokens * attention.flops_per_token / layer.flops, each).max())
