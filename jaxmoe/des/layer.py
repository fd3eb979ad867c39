"""Replay of one MoE layer, message by message: dispatch, compute, combine.

An independent witness of the analytic model: it shares its inputs (shares, tokens, the description of the
machine) and none of its formulas. Every time it reports is the end of a simulated task graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.compute import node_seconds
from jaxmoe.des.description import LayerDescription
from jaxmoe.des.engine import Run, simulate
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.des.rows import Rows, one_each
from jaxmoe.des.tasks import GraphBuilder
from jaxmoe.des.tokens import plan_tokens
from jaxmoe.des.transfers import Transfers, add_transfers, no_rows
from jaxmoe.traces import Batch

STAGES = ("dispatch", "compute", "combine")


@dataclass(frozen=True)
class LayerReplay:
    """Seconds a layer took, and seconds each resource was busy.

    `stages`: dispatch and combine simulated alone, and compute, the slowest node. `total_s`: the whole layer with a
    barrier between stages. `free_running_s`: without barriers, so a node computes as soon as its own inputs are
    there, and sends as soon as it has computed. `link_busy` is of dispatch and of combine.
    """

    stages: dict[str, float]
    total_s: float
    free_running_s: float
    link_busy: dict[str, Float[np.ndarray, " link"]]
    node_busy: Float[np.ndarray, " node"]


@dataclass(frozen=True)
class RecordedLayer:
    """A layer simulated with a barrier between stages: a run with its services, and the stage of every task."""

    run: Run
    stage: list[str]


def replay_layer(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> LayerReplay:
    """Simulate `batch` (leaves without leading axes, every weight 1) under the placement `share`.

    `served` is what a runtime policy decided: the node that computes a choice alone; -1, as placed.
    """
    work = _work(layer, share, batch, served)
    alone = {"dispatch": _stage(layer, work.dispatch), "combine": _stage(layer, work.combine)}
    whole, free = _layer(layer, work, barriers=True).run, _layer(layer, work, barriers=False).run
    seconds = {"compute": float(whole.node_busy.max())} | {name: run.makespan for name, run in alone.items()}
    return LayerReplay(
        stages={name: seconds[name] for name in STAGES},
        total_s=whole.makespan,
        free_running_s=free.makespan,
        link_busy={name: run.link_busy[: layer.fabric.num_links] for name, run in alone.items()},
        node_busy=whole.node_busy,
    )


def layer_seconds(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> float:
    """`total_s` of `replay_layer` alone, of whose four simulations it needs one, s."""
    return _layer(layer, _work(layer, share, batch, served), barriers=True).run.makespan


def record_layer(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> RecordedLayer:
    """The simulation behind `total_s` of `replay_layer`, with what every link and node did when."""
    return _layer(layer, _work(layer, share, batch, served), barriers=True, record=True)


def replay_plan(
    layer: LayerDescription,
    shares: Float[np.ndarray, "layer expert node"],
    batches: Batch,
    progress: Callable[[int, int], None] | None = None,
    served: Int[np.ndarray, "layer batch token top_k"] | None = None,
) -> list[list[LayerReplay]]:
    """Replay every batch (leaves [layer, batch, token, ...]) of every layer: results [layer][batch].

    `served` is as in `replay_layer`. `progress` is called after each replay with the number done and the number in all.
    """
    leaves = jax.tree.map(np.asarray, batches)
    layers, count = leaves.experts.shape[:2]
    if len(shares) != layers:
        raise ValueError(f"shares of {len(shares)} layers for batches of {layers}")
    replays: list[list[LayerReplay]] = [[] for _ in range(layers)]
    for done, (row, column) in enumerate(np.ndindex(layers, count), start=1):
        batch = jax.tree.map(lambda leaf, at=(row, column): leaf[at], leaves)
        decided = None if served is None else served[row, column]
        replays[row].append(replay_layer(layer, shares[row], batch, decided))
        if progress is not None:
            progress(done, layers * count)
    return replays


@dataclass(frozen=True)
class _Work:
    """What a batch makes the machine do: transfers of both stages in parts, and seconds of every node."""

    dispatch: list[Transfers]
    seconds: Float[np.ndarray, " node"]
    combine: list[Transfers]


def _work(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None,
) -> _Work:
    plan = plan_tokens(layer, share, batch, served)

    def transfers(size: float, mirrored: bool) -> list[Transfers]:
        return stage_transfers(layer.exchange, layer.fabric, plan.visited, plan.home, size, mirrored)

    return _Work(
        dispatch=transfers(layer.dispatch_bytes, mirrored=True),
        seconds=node_seconds(layer, plan, batch),
        combine=transfers(layer.combine_bytes, mirrored=False),
    )


def _stage(layer: LayerDescription, parts: Sequence[Transfers]) -> Run:
    """One stage of communication, alone, every node ready at time 0."""
    graph = _graph(layer)
    _add_stage(graph, parts, ready=no_rows(layer.num_nodes))
    return _simulate(layer, graph)


def _layer(layer: LayerDescription, work: _Work, barriers: bool, record: bool = False) -> RecordedLayer:
    """The whole layer in one simulation. A barrier counts as part of the stage it ends."""
    graph, nodes, ends = _graph(layer), np.arange(layer.num_nodes), []
    inputs = _add_stage(graph, work.dispatch, ready=no_rows(layer.num_nodes))
    if barriers:
        inputs = _join(graph, inputs)
    ends.append(graph.num_tasks)
    ready = one_each(graph.computations(nodes, work.seconds, inputs))
    if barriers:
        ready = _join(graph, ready)
    ends.append(graph.num_tasks)
    _add_stage(graph, work.combine, ready)
    ends.append(graph.num_tasks)
    stage = np.repeat(STAGES, np.diff(ends, prepend=0)).tolist()
    return RecordedLayer(_simulate(layer, graph, record), stage)


def _add_stage(graph: GraphBuilder, parts: Sequence[Transfers], ready: Rows) -> Rows:
    """Add the parts, with a barrier between them. Returns for every node the tasks after which it has all its own."""
    for index, transfers in enumerate(parts):
        received = add_transfers(graph, transfers, ready)
        if index + 1 == len(parts):
            return received
        ready = _join(graph, ready, received)
    return ready


def _join(graph: GraphBuilder, *tasks: Rows) -> Rows:
    """Make every node wait for the tasks of all nodes."""
    barrier = graph.barrier(np.concatenate([rows.items for rows in tasks]))
    return one_each(np.full(len(tasks[0]), barrier))


def _graph(layer: LayerDescription) -> GraphBuilder:
    return GraphBuilder(len(layer.fabric.rate), layer.num_nodes, layer.fabric.chunk_bytes)


def _simulate(layer: LayerDescription, graph: GraphBuilder, record: bool = False) -> Run:
    fabric = layer.fabric
    return simulate(graph.build(), fabric.rate, fabric.latency, cut_through=fabric.cut_through, record=record)
