"""Dies that fetch their own experts from memory, in the event simulator: every load and every product a task."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.event_loop import simulate
from jaxmoe.des.tasks import GraphBuilder


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
        product = _product(layer, die, int(tokens[expert])) + control
        done[die].append(graph.compute(die, product, [load, *done[die][-1:]]))
    return simulate(graph.build(), np.zeros(0), np.zeros(0)).makespan


def _product(layer: LayerDescription, die: int, tokens: int) -> float:
    if layer.gemm is None:
        return float(tokens * layer.flops_per_token_expert / layer.flops[die])
    return float(layer.gemm(np.array([die]), np.array([tokens]), np.ones(1))[0])
