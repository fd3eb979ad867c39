"""Dies that keep their slices of an expert while tokens go round, in the event simulator: every step a task.

Source: expert_streaming_fse_dp section III, Fig. 3b. Servers are the arrays, the DDR channels and the senders of the
dies. A transfer keeps its sender busy at the pace of the slowest link or port of its path; as every die has one die
before it on the ring, none waits for a receiver.
"""

import numpy as np
from jaxtyping import Int

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.event_loop import simulate
from jaxmoe.des.streaming_layer import Slicing, compute_seconds, send_seconds
from jaxmoe.des.tasks import GraphBuilder


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
