"""Replay of one MoE layer, message by message: dispatch, compute, combine.

An independent witness of the analytic model: it shares its inputs (shares, tokens, the description of the
machine) and none of its formulas. Every time it reports is the end of a simulated task graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.copies import served_batch, served_in_turn
from jaxmoe.des.description import (
    LayerDescription,
    node_bytes,
    node_flops,
    node_seconds,
    plan_tokens,
    token_sources,
)
from jaxmoe.des.event_loop import SimulatedRun, run_on
from jaxmoe.des.exchanges import choices_in_turn, deciding_transfers, stage_transfers, told_transfers
from jaxmoe.des.fabric import Rows, joined_rows, one_each
from jaxmoe.des.tasks import GraphBuilder, Transfers, add_transfers, no_rows
from jaxmoe.des.weights import in_chunks, to_all, travelling
from jaxmoe.placement.copies import Copies
from jaxmoe.threads import side_by_side
from jaxmoe.traces import Batch

STAGES = ("dispatch", "compute", "combine")


@dataclass(frozen=True)
class LayerReplay:
    """Seconds a layer took, and seconds each resource was busy.

    `stages`: dispatch and combine simulated alone, and compute, the slowest node; of all micro-batches together.
    `total_s`: the whole layer with a barrier between stages, so their sum unless micro-batches overlap.
    `free_running_s`: the whole batch without barriers, so a node computes as soon as its own inputs are there, and
    sends as soon as it has computed. `link_busy` is of dispatch and of combine. What energy is spent on is counted as
    well: bytes that every link carries in both, and FLOPs and bytes of every memory level of every node.
    """

    stages: dict[str, float]
    total_s: float
    free_running_s: float
    link_busy: dict[str, Float[np.ndarray, " link"]]
    node_busy: Float[np.ndarray, " node"]
    link_bytes: Float[np.ndarray, " link"]
    flops: Float[np.ndarray, " node"]
    memory_bytes: Float[np.ndarray, "level node"]


@dataclass(frozen=True)
class RecordedLayer:
    """A layer simulated with a barrier between stages: a run with its services, and the stage of every task."""

    run: SimulatedRun
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
    parts = _parts(layer, share, batch, served)
    work = parts[0] if len(parts) == 1 else _work(layer, share, batch, served)
    # Side by side, for the event loop leaves Python's lock. One batch needs no run with barriers: its stages follow
    # each other.
    names = ("dispatch", "combine")
    simulations = [
        partial(_without_barriers, layer, work),
        *(partial(_stage, layer, getattr(part, name)) for name in names for part in parts),
        *([partial(_with_barriers, layer, parts)] if len(parts) > 1 else []),
    ]
    free, *runs = side_by_side(lambda simulation: simulation(), simulations)
    sent = {name: runs[at * len(parts) :][: len(parts)] for at, name in enumerate(names)}
    whole = runs[len(names) * len(parts) :]
    links = slice(layer.fabric.num_links)
    link_busy = {name: np.sum([run.link_busy[links] for run in stage], axis=0) for name, stage in sent.items()}
    seconds = {name: sum(run.makespan for run in stage) for name, stage in sent.items()}
    seconds["compute"] = sum(float(part.seconds.max()) for part in parts)
    stages = {name: seconds[name] for name in STAGES}
    return LayerReplay(
        stages=stages,
        total_s=whole[0].makespan if whole else sum(stages.values()),
        free_running_s=free.makespan,
        link_busy=link_busy,
        node_busy=np.sum([part.seconds for part in parts], axis=0),
        link_bytes=np.sum([*link_busy.values()], axis=0) * layer.fabric.rate[links],
        flops=np.sum([part.flops for part in parts], axis=0),
        memory_bytes=np.sum([part.memory_bytes for part in parts], axis=0),
    )


def layer_seconds(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> float:
    """`total_s` of `replay_layer` alone, by one simulation, s."""
    return _with_barriers(layer, _parts(layer, share, batch, served)).makespan


def record_layer(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> RecordedLayer:
    """The simulation behind `total_s` of `replay_layer`, with what every link and node did when."""
    return _layer(layer, _parts(layer, share, batch, served), record=True)


def replay_plan(
    layer: LayerDescription,
    shares: Float[np.ndarray, "layer expert node"],
    batches: Batch,
    progress: Callable[[int, int], None] | None = None,
    served: Int[np.ndarray, "layer batch token top_k"] | None = None,
    copies: Copies | None = None,
) -> list[list[LayerReplay]]:
    """Replay every batch (leaves [layer, batch, token, ...]) of every layer: results [layer][batch].

    `served` is as in `replay_layer`. With `copies`, whose shares these are, each choice is served by one of them.
    `progress` is called after each replay with the number done and the number in all.
    """
    leaves = jax.tree.map(np.asarray, batches)
    layers, count = leaves.experts.shape[:2]
    if len(shares) != layers:
        raise ValueError(f"shares of {len(shares)} layers for batches of {layers}")
    layer = layer if copies is None else replace(layer, serving=copies.serving)
    replays: list[list[LayerReplay]] = [[] for _ in range(layers)]
    for done, (row, column) in enumerate(np.ndindex(layers, count), start=1):
        batch = jax.tree.map(lambda leaf, at=(row, column): leaf[at], leaves)
        batch = batch if copies is None else served_batch(copies, row, batch)
        decided = None if served is None else served[row, column]
        replays[row].append(replay_layer(layer, shares[row], batch, decided))
        if progress is not None:
            progress(done, layers * count)
    return replays


class _Pause(NamedTuple):
    """Seconds for which messages wait, and nodes need not."""

    seconds: float


@dataclass(frozen=True)
class _Work:
    """Tasks of one batch or micro-batch: its transfers, and the time of every node, s.

    `dispatch` and `combine` are lists of parts, with a barrier between a part and the next. `flops` and
    `memory_bytes` are the work behind `seconds`.
    """

    dispatch: list[Transfers | _Pause]
    seconds: Float[np.ndarray, " node"]
    combine: list[Transfers]
    flops: Float[np.ndarray, " node"]
    memory_bytes: Float[np.ndarray, "level node"]


def _work(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None,
) -> _Work:
    plan = plan_tokens(layer, share, batch, served)

    def transfers(size: float, mirrored: bool) -> list[Transfers]:
        draw = np.asarray(batch.token_draw)
        return stage_transfers(layer.exchange, layer.fabric, plan.visited, plan.home, size, mirrored, draw)

    return _Work(
        dispatch=[
            *_deciding(layer, batch),
            *deciding_transfers(layer.exchange, layer.fabric, plan.visited, plan.home),
            *transfers(layer.dispatch_bytes, mirrored=True),
        ],
        seconds=node_seconds(layer, plan, batch),
        combine=transfers(layer.combine_bytes, mirrored=False),
        flops=node_flops(layer, plan),
        memory_bytes=node_bytes(layer, plan),
    )


def _deciding(layer: LayerDescription, batch: Batch) -> list[Transfers | _Pause]:
    """Where a rule has to know the batch: tokens are told of to all nodes, and then choose in turn."""
    lives = token_sources(batch, layer.num_nodes)
    tokens = len(lives)
    of_rules = (served_in_turn(layer.serving, tokens), choices_in_turn(layer.exchange, tokens))
    turns = [each for each in of_rules if each is not None]
    told = [told_transfers(layer.fabric, lives, layer.told_bytes)] if turns and tokens and layer.told_bytes else []
    paused = sum(turns) * layer.choice_seconds
    return [*told, *([_Pause(paused)] if paused else [])]


def _parts(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None,
) -> list[_Work]:
    """The work of every micro-batch: equally many successive tokens, the last ones maybe fewer or none."""
    tokens = len(batch.weight)
    size = -(-tokens // layer.micro_batches)
    if size == tokens:
        return [_work(layer, share, batch, served)]
    # Where a token lives does not depend on how its batch is cut.
    lives = np.asarray(batch.sources(layer.num_nodes))
    batch = eqx.tree_at(lambda batch: batch.source, batch, lives, is_leaf=lambda leaf: leaf is None)
    works = []
    for first in range(0, tokens, size):
        rows = slice(first, first + size)
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        works.append(_work(layer, share, part, None if served is None else served[rows]))
    return works


def _stage(layer: LayerDescription, parts: Sequence[Transfers | _Pause]) -> SimulatedRun:
    """Simulate one stage of communication alone, with every node ready at time 0."""
    graph = _graph(layer)
    _add_stage(graph, parts, ready=no_rows(layer.num_nodes))
    return _simulate(layer, graph)


def _layer(layer: LayerDescription, parts: Sequence[_Work], record: bool = False) -> RecordedLayer:
    """Simulate a whole layer, with a barrier after every stage; a barrier counts as part of its stage.

    The network serves one stage at a time, and a micro-batch computes when the one before has computed.
    """
    graph, nodes = _graph(layer), np.arange(layer.num_nodes)
    network = computed = no_rows(layer.num_nodes)
    waiting: list[tuple[_Work, Rows]] = []  # micro-batches to be combined, and when they have computed
    stage: list[str] = []

    def done(name: str, *tasks: Rows) -> Rows:
        barrier = _join(graph, *tasks)
        stage.extend([name] * (graph.num_tasks - len(stage)))
        return barrier

    def combine(network: Rows) -> Rows:
        work, ready = waiting.pop(0)
        ready = done("combine", network, ready)
        return done("combine", ready, _add_stage(graph, work.combine, ready))

    for work in parts:
        network = done("dispatch", network, _add_stage(graph, work.dispatch, network))
        ready = done("compute", network, computed)
        computed = done("compute", one_each(graph.computations(nodes, work.seconds, ready)))
        waiting.append((work, computed))
        if len(waiting) > 1:
            network = combine(network)
    combine(network)
    return RecordedLayer(_simulate(layer, graph, record), stage)


def _with_barriers(layer: LayerDescription, parts: Sequence[_Work]) -> SimulatedRun:
    """Simulate the whole layer, with a barrier after every stage."""
    return _layer(layer, parts).run


def _without_barriers(layer: LayerDescription, work: _Work) -> SimulatedRun:
    """Simulate the whole layer without barriers: every node computes and sends as soon as it has its inputs."""
    graph = _graph(layer)
    inputs = _add_stage(graph, work.dispatch, ready=no_rows(layer.num_nodes))
    computed = graph.computations(np.arange(layer.num_nodes), work.seconds, inputs)
    _add_stage(graph, work.combine, one_each(computed))
    return _simulate(layer, graph)


def _add_stage(graph: GraphBuilder, parts: Sequence[Transfers | _Pause], ready: Rows) -> Rows:
    """Add the parts, with a barrier between them. Returns for every node the tasks after which it has all its own."""
    paused = no_rows(len(ready))
    for index, part in enumerate(parts):
        if isinstance(part, _Pause):
            received = paused = _paused(graph, part, ready)
        else:
            received = add_transfers(graph, part, ready)
        if index + 1 == len(parts):
            return joined_rows(received, paused) if len(paused.items) else received  # nobody begins undecided
        ready = _join(graph, ready, received)
    return ready


def _paused(graph: GraphBuilder, pause: _Pause, ready: Rows) -> Rows:
    """Make every node wait for the others and then for the pause, which is served by no node of the machine."""
    waiting = graph.barrier(ready.items)
    (over,) = graph.computations(np.array([len(ready)]), np.array([pause.seconds]), one_each(np.array([waiting])))
    return one_each(np.full(len(ready), over))


def _join(graph: GraphBuilder, *tasks: Rows) -> Rows:
    """Make every node wait for the tasks of all nodes."""
    barrier = graph.barrier(np.concatenate([rows.items for rows in tasks]))
    return one_each(np.full(len(tasks[0]), barrier))


def _graph(layer: LayerDescription) -> GraphBuilder:
    servers = layer.num_nodes + (layer.choice_seconds > 0)  # the last one serves pauses
    return GraphBuilder(len(layer.fabric.rate), servers, layer.fabric.chunk_bytes)


def _simulate(layer: LayerDescription, graph: GraphBuilder, record: bool = False) -> SimulatedRun:
    return run_on(layer.fabric, graph.build(), record)


def seconds_beside_weights(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    stored: Float[np.ndarray, "expert node"],
    destination: Bool[np.ndarray, "expert node"],
    before: float = 0.0,
) -> tuple[float, float]:
    """Seconds of a layer while weights travel on what its messages leave idle of the links, and until they are there.

    Weights leave when the layer begins, with the `before` s in which nodes alone are at work, as in attention. They
    make room for any message at once. A barrier follows every stage.
    """
    parts, nodes = travelling(stored, destination), np.arange(layer.num_nodes)
    # Weights have larger chunks than messages, which need not wait for any.
    fabric, work, graph = in_chunks(layer, stored, parts), _work(layer, share, batch, None), _graph(layer)
    nothing = no_rows(layer.num_nodes)
    begun = one_each(graph.computations(nodes, np.full(len(nodes), before), nothing))
    dispatched = _join(graph, _add_stage(graph, work.dispatch, _join(graph, begun)))
    computed = _join(graph, one_each(graph.computations(nodes, work.seconds, dispatched)))
    ended = _join(graph, computed, _add_stage(graph, work.combine, computed))
    sent = [
        add_transfers(graph, to_all(layer, fabric, stored, destination, part), nothing, background=True, whole=True)
        for part in parts
    ]
    arrived = _join(graph, *sent) if sent else None
    finish = run_on(layer.fabric, graph.build()).finish
    return float(finish[ended.items[0]]), 0.0 if arrived is None else float(finish[arrived.items[0]])
