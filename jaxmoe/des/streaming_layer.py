"""A MoE layer on dies that load experts from memory, laid out for the simulator (expert_streaming_fse_dp III).

Experts stream through dies; or dies fetch their own whole; or they keep slices while tokens go round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.buffers import BufferError
from jaxmoe.des.description import LayerDescription
from jaxmoe.des.event_loop import simulate
from jaxmoe.des.fabric import Fabric
from jaxmoe.des.streaming import Flow
from jaxmoe.des.tasks import GraphBuilder


@dataclass(frozen=True)
class Slicing:
    """How experts are cut, and what is decided as a rule; see `jaxmoe.des.streaming`.

    The slice of every die is cut into `micro_slices`, of which `buffer_bytes` of each die hold some. Each load,
    transfer and computation of one takes `control` seconds more. Raises `BufferError` for a slice that no buffer holds.
    """

    micro_slices: int
    buffer_bytes: float
    control: float = 0.0
    matched: bool = True
    balanced: bool = False
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.micro_slices < 1:
            raise BufferError(f"micro_slices is {self.micro_slices}, expected at least 1")

    def slots(self, slice_bytes: float) -> int:
        """Number of micro-slices that a die's buffer holds. Raises `BufferError` where it cannot hold one."""
        if slice_bytes > self.buffer_bytes:
            raise BufferError(
                f"a micro-slice has {slice_bytes:g} B, but a die's buffer {self.buffer_bytes:g} B; "
                "use more micro-slices or a larger buffer"
            )
        return int(self.buffer_bytes / slice_bytes * (1 + 1e-6))


def flow_of(
    layer: LayerDescription,
    slicing: Slicing,
    tokens: Int[np.ndarray, "expert die"],
    groups: Int[np.ndarray, "group member"],
    following: Int[np.ndarray, "expert die"],
    loading: Bool[np.ndarray, "expert die"],
    held: Int[np.ndarray, "expert die"] | None = None,
) -> Flow:
    """The flow of one layer: experts with `tokens`, loaded by `groups` (-1: no expert) along their trajectories.

    `following` names the die after every die; the dies `loading` an expert take its micro-slices in turns, and the
    first so many of them are `held` there from the start. Raises
    `BufferError` for buffers that are too small, and `ValueError` for trajectories over dies that are not there and
    experts that are in no group.
    """
    dies, parts = layer.num_nodes, slicing.micro_slices
    needed = tokens > 0
    for expert, die in np.argwhere((following < 0) | (following >= dies))[:1]:
        raise ValueError(
            f"the trajectory of expert {expert} leads from die {die} to die {following[expert, die]}, expected one of "
            f"0..{dies - 1}"
        )
    if not layer.memory or len(layer.memory[-1].bandwidth) == 0 or (layer.memory[-1].bandwidth <= 0).any():
        raise ValueError("experts stream from memory, but the machine has no channel with a bandwidth; list one")
    place = np.full(len(tokens), -1)
    for at, members in enumerate(groups):
        place[members[members >= 0]] = at
    for expert in np.flatnonzero(needed.any(axis=1) & (place < 0))[:1]:
        raise ValueError(f"expert {expert} has tokens but is in no group")
    slice_bytes = layer.expert_bytes / (dies * parts)
    # Rounds: each die that loads takes one micro-slice of every member of the group in turn.
    members = np.array([expert for row in groups for expert in row if expert >= 0 and needed[expert].any()], np.int64)
    expert = np.repeat(members, parts * dies)
    count = loading.sum(axis=1)[expert]
    number = np.tile(np.arange(parts * dies), len(members))
    origin = np.argsort(~loading, axis=1, kind="stable")[expert, number % count]
    order = np.lexsort((np.repeat(np.arange(len(members)), parts * dies), number // count, place[expert]))
    memory = layer.memory[-1]
    return Flow(
        expert=expert[order],
        origin=origin[order],
        held=np.zeros(len(order), bool) if held is None else (number // count < held[expert, origin])[order],
        group=np.where(place < 0, 0, place),
        following=following,
        needed=needed,
        compute=compute_seconds(layer, slicing, tokens),
        load=slice_bytes / memory.bandwidth[memory.channel] + slicing.control,
        latency=memory.latency,
        channel=memory.channel.astype(np.int64),
        send=send_seconds(layer.fabric, slice_bytes, slicing.control),
        paths=layer.fabric.routes.rows,
        capacity=np.full(dies, slicing.slots(slice_bytes)),
        balanced=slicing.balanced,
        matched=slicing.matched,
        in_turn=slicing.in_turn,
    )


def compute_seconds(
    layer: LayerDescription, slicing: Slicing, tokens: Int[np.ndarray, "expert die"]
) -> Float[np.ndarray, "expert die"]:
    """Time to compute one micro-slice of every expert on every die, s: its matrix products and a fixed control time."""
    expert, die = np.nonzero(tokens)
    seconds = np.zeros(tokens.shape)
    products = _products(layer, die, tokens[expert, die], layer.num_nodes * slicing.micro_slices)
    seconds[expert, die] = products + slicing.control
    return seconds


def _products(
    layer: LayerDescription, die: Int[np.ndarray, " product"], tokens: Int[np.ndarray, " product"], parts: int
) -> Float[np.ndarray, " product"]:
    """Time of dies for the products of so many tokens with one of so many equal parts of an expert, s."""
    if layer.gemm is None:
        return tokens * layer.flops_per_token_expert / parts / layer.flops[die]
    return layer.gemm(die, tokens, np.full(len(die), 1 / parts))


def send_seconds(fabric: Fabric, size: float, control: float) -> Float[np.ndarray, "die die2"]:
    """Time to send `size` B from every die to every other, s.

    It is the sum of the latencies of the path, of `size` over its slowest link or port, and of a fixed control time.
    """
    path, dies = fabric.paths.rows, fabric.num_nodes
    slowest, latency = np.full(dies**2, np.inf), np.zeros(dies**2)
    np.minimum.at(slowest, path.owner, fabric.rate[path.items])
    np.add.at(latency, path.owner, fabric.latency[path.items])
    away = ~np.eye(dies, dtype=bool)
    return away * (size / slowest + latency + control).reshape(dies, dies)


# Dies that fetch their own experts from memory: every load and every product a task.


def offloaded(
    layer: LayerDescription,
    tokens: Int[np.ndarray, " expert"],
    host: Int[np.ndarray, " expert"],
    prefetch: bool,
    control: float = 0.0,
) -> float:
    """Seconds until every die has loaded and computed its experts with tokens, each by number.

    With `prefetch` an expert is loaded while the one before is computed, else after it.
    """
    dies, memory = layer.num_nodes, layer.memory[-1]
    graph = GraphBuilder(0, dies + len(memory.bandwidth))
    done: list[list[int]] = [[] for _ in range(dies)]
    waits_first = memory.latency.copy()  # of a channel, once
    rank = np.array([(host[:expert] == die).sum() for expert, die in enumerate(host)])
    for expert in np.lexsort((host, rank)):
        if not tokens[expert]:
            continue
        die = int(host[expert])
        channel = int(memory.channel[die])
        waits: Sequence[int] = done[die][-2:-1] if prefetch else done[die][-1:]
        seconds = layer.expert_bytes / memory.bandwidth[channel] + control + waits_first[channel]
        waits_first[channel] = 0
        load = graph.compute(dies + channel, float(seconds), waits)
        product = float(_products(layer, np.array([die]), tokens[[expert]], 1)[0]) + control
        done[die].append(graph.compute(die, product, [load, *done[die][-1:]]))
    return simulate(graph.build(), np.zeros(0), np.zeros(0)).makespan


# Dies that keep their slices of an expert while tokens go round: every step a task (III, Fig. 3b).
#
# Servers are the arrays, the DDR channels and the senders of the dies. A transfer keeps its sender busy at the pace of
# the slowest link or port of its path; as every die has one die before it on the ring, none waits for a receiver.


def circulated(
    layer: LayerDescription,
    tokens: Int[np.ndarray, "expert die"],
    ring: Int[np.ndarray, " die"],
    prefetch: bool,
    control: float = 0.0,
) -> float:
    """Seconds until the results of all experts are home. Experts go by number, each die's slice loaded in that order.

    With `prefetch` a slice is loaded while the one before is in use, else after it.
    """
    dies, memory = layer.num_nodes, layer.memory[-1]
    senders, places = dies + len(memory.bandwidth), ring.tolist()
    graph = GraphBuilder(0, senders + dies)
    load = layer.expert_bytes / dies / memory.bandwidth + control
    whole = Slicing(1, np.inf, control)
    out, back = (
        [send_seconds(layer.fabric, count * size, control) for count in range(tokens.max(initial=0) + 1)]
        for size in (layer.dispatch_bytes + layer.combine_bytes, layer.combine_bytes)
    )
    used: list[list[int]] = [[] for _ in range(dies)]  # the last task of each slice
    busy: list[list[int]] = [[] for _ in range(dies)]  # of each array
    waits_first = memory.latency.copy()  # of a channel, once
    for counts in tokens[tokens.any(axis=1)]:
        slices = []
        for die in places:
            channel = int(memory.channel[die])
            waits = used[die][-2:-1] if prefetch else used[die][-1:]
            slices.append(graph.compute(dies + channel, float(load[channel] + waits_first[channel]), waits))
            waits_first[channel] = 0
        arrived: list[list[int]] = [[] for _ in range(dies)]  # what the sequence on each place of the ring waits for
        last = [[one] for one in slices]
        held = [int(counts[die]) for die in places]
        for phase in range(dies):
            after: list[list[int]] = [[] for _ in range(dies)]
            for place, die in enumerate(places):
                if not held[place]:
                    continue
                to = places[(place + 1) % dies]
                on_die = np.zeros((1, dies), int)
                on_die[0, die] = held[place]
                seconds = float(compute_seconds(layer, whole, on_die)[0, die])
                done = graph.compute(die, seconds, [*arrived[place], slices[place], *busy[die][-1:]])
                busy[die].append(done)
                last[place].append(done)
                moved = float((out if phase < dies - 1 else back)[held[place]][die, to])
                after[(place + 1) % dies] = [graph.compute(senders + die, moved, [done])]
            arrived, held = after, [held[place - 1] for place in range(dies)]
        for place, die in enumerate(places):
            used[die].append(graph.barrier(last[place]))
    return simulate(graph.build(), np.zeros(0), np.zeros(0)).makespan
