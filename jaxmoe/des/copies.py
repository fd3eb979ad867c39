"""Which copy of an expert serves a choice, worked out choice by choice as a run would, apart from the model."""

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import token_sources
from jaxmoe.placement.copies import ALIKE, Copies, LeastWork
from jaxmoe.traces import Batch


def served_batch(copies: Copies, layer: int, batch: Batch) -> Batch:
    """A batch of one layer, leaves [token, ...], with the copy that serves each choice in place of its expert."""
    experts = np.asarray(batch.experts)
    if isinstance(copies.serving, LeastWork):
        named = _least_work(copies, layer, copies.serving, experts)
    else:
        source = token_sources(batch, copies.share.shape[2])
        named = copies.served(layer, experts, source, np.asarray(batch.draw))
    return eqx.tree_at(lambda batch: batch.experts, batch, named)


def _least_work(
    copies: Copies, layer: int, rule: LeastWork, experts: Int[np.ndarray, "token top_k"]
) -> Int[np.ndarray, "token top_k"]:
    """Token after token, choice after choice: the copy whose hosts have done least, and are mostly visited anyway."""
    share = copies.share[layer].astype(np.float64)
    able = [np.flatnonzero(copies.copy_of[layer] == expert) for expert in range(copies.num_experts)]
    hosts = [np.flatnonzero(row) for row in share]
    work = np.zeros(share.shape[1])
    mean = (experts >= 0).sum() / len(work)  # of all nodes at the end
    named = np.full_like(experts, -1)
    for token, choices in enumerate(experts):
        visited: set[int] = set()
        for place, expert in enumerate(choices):
            if expert < 0:
                continue
            costs: Float[np.ndarray, " copy"] = np.array(
                [
                    rule.work[layer] * max(work[node] + share[copy, node] for node in hosts[copy]) / mean
                    + rule.visits[layer] * len({*hosts[copy].tolist()} - visited)
                    for copy in able[expert]
                ]
            )
            copy = able[expert][np.flatnonzero(costs <= costs.min() * (1 + ALIKE))[0]]
            named[token, place] = copy
            work += share[copy]
            visited |= {*hosts[copy].tolist()}
    return named
