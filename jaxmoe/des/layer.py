"""Replay of one MoE layer, message by message: dispatch, compute, combine.

An independent witness of the analytic model: it shares its inputs (shares, tokens, the description of the
machine) and none of its formulas. Every time it reports is the end of a simulated task graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.engine import Run, simulate
from jaxmoe.des.schedules import (
    Send,
    add_sends,
    all_rings_sends,
    gather_sends,
    scatter_sends,
)
from jaxmoe.des.tasks import GraphBuilder
from jaxmoe.des.tokens import TokenPlan, node_seconds, plan_tokens
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class LayerReplay:
    """Seconds a layer took, and seconds each resource was busy.

    `dispatch_s` and `combine_s`: the stage simulated alone. `compute_s`: the slowest node. `total_s`: the whole
    layer with a barrier between stages. `free_running_s`: without barriers, so a node computes as soon as its
    own inputs are there, and sends as soon as it has computed.
    """

    dispatch_s: float
    compute_s: float
    combine_s: float
    total_s: float
    free_running_s: float
    dispatch_link_busy: Float[np.ndarray, " link"]
    combine_link_busy: Float[np.ndarray, " link"]
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
    plan = plan_tokens(layer, share, batch, served)
    dispatch, combine = _sends(layer, plan)
    dispatch_alone, combine_alone = _stage(layer, dispatch, mirrored=True), _stage(layer, combine, mirrored=False)
    whole = _layer(layer, dispatch, node_seconds(layer, plan), combine, barriers=True)
    free = _layer(layer, dispatch, node_seconds(layer, plan), combine, barriers=False)
    return LayerReplay(
        dispatch_s=dispatch_alone.makespan,
        compute_s=float(whole.node_busy.max()),
        combine_s=combine_alone.makespan,
        total_s=whole.makespan,
        free_running_s=free.makespan,
        dispatch_link_busy=dispatch_alone.link_busy[: layer.fabric.num_links],
        combine_link_busy=combine_alone.link_busy[: layer.fabric.num_links],
        node_busy=whole.node_busy,
    )


def layer_seconds(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> float:
    """`total_s` of `replay_layer` alone, of whose four simulations it needs one, s."""
    plan = plan_tokens(layer, share, batch, served)
    dispatch, combine = _sends(layer, plan)
    return _layer(layer, dispatch, node_seconds(layer, plan), combine, barriers=True).makespan


def record_layer(layer: LayerDescription, share: Float[np.ndarray, "expert node"], batch: Batch) -> RecordedLayer:
    """The simulation behind `total_s` of `replay_layer`, with what every link and node did when."""
    plan = plan_tokens(layer, share, batch)
    dispatch, combine = _sends(layer, plan)
    run = _layer(layer, dispatch, node_seconds(layer, plan), combine, barriers=True, record=True)
    # Tasks are in the order in which `_layer` adds them. A barrier counts as part of the stage it ends.
    stage = ["dispatch"] * (len(dispatch) + 1) + ["compute"] * (layer.num_nodes + 1) + ["combine"] * len(combine)
    return RecordedLayer(run, stage)


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


def _sends(layer: LayerDescription, plan: TokenPlan) -> tuple[list[Send], list[Send]]:
    """The messages of dispatch and of combine."""
    if layer.rings is None:
        gathered = gather_sends(plan.visited, plan.gather, layer.message_bytes)
        return scatter_sends(gathered), gathered
    # The mirror of a reduce-scatter is an all-gather that goes round the other way.
    back = [ring[::-1] for ring in layer.rings]
    return (
        all_rings_sends(back, plan.visited, layer.message_bytes, layer.both_ways),
        all_rings_sends(layer.rings, plan.visited, layer.message_bytes, layer.both_ways),
    )


def _stage(layer: LayerDescription, sends: list[Send], mirrored: bool) -> Run:
    """One stage of communication, alone, every node ready at time 0."""
    graph = _graph(layer)
    paths = layer.fabric.mirrored if mirrored else layer.fabric.paths
    add_sends(graph, sends, paths, ready=[()] * layer.num_nodes)
    return _simulate(layer, graph)


def _layer(
    layer: LayerDescription,
    dispatch: list[Send],
    seconds: Float[np.ndarray, " node"],
    combine: list[Send],
    barriers: bool,
    record: bool = False,
) -> Run:
    """The whole layer in one simulation."""
    graph = _graph(layer)
    inputs: Sequence[Sequence[int]] = add_sends(graph, dispatch, layer.fabric.mirrored, ready=[()] * layer.num_nodes)
    if barriers:
        inputs = _join(graph, inputs)
    computed: Sequence[Sequence[int]] = [
        (graph.compute(node, duration, inputs[node]),) for node, duration in enumerate(seconds.tolist())
    ]
    if barriers:
        computed = _join(graph, computed)
    add_sends(graph, combine, layer.fabric.paths, ready=computed)
    return _simulate(layer, graph, record)


def _join(graph: GraphBuilder, tasks: Sequence[Sequence[int]]) -> list[tuple[int]]:
    """Make every node wait for the tasks of all nodes."""
    barrier = graph.barrier([task for row in tasks for task in row])
    return [(barrier,)] * len(tasks)


def _graph(layer: LayerDescription) -> GraphBuilder:
    return GraphBuilder(len(layer.fabric.rate), layer.num_nodes, layer.fabric.chunk_bytes)


def _simulate(layer: LayerDescription, graph: GraphBuilder, record: bool = False) -> Run:
    fabric = layer.fabric
    return simulate(graph.build(), fabric.rate, fabric.latency, cut_through=fabric.cut_through, record=record)
