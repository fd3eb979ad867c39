"""Which copy of an expert serves a choice, worked out choice by choice as a run would, apart from the model."""

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import token_sources
from jaxmoe.placement.copies import ALIKE, Copies, LeastWork, Serving
from jaxmoe.traces import Batch


def served_batch(copies: Copies, layer: int, batch: Batch) -> Batch:
    """A batch of one layer, leaves [token, ...], with the copy that serves each choice in place of its expert."""
    experts = np.asarray(batch.experts)
    if isinstance(copies.serving, LeastWork):
        chosen = _together if copies.serving.together else _least_work
        named = chosen(copies, layer, copies.serving, experts)
    else:
        source = token_sources(batch, copies.share.shape[2])
        named = copies.served(layer, experts, source, np.asarray(batch.draw))
    return eqx.tree_at(lambda batch: batch.experts, batch, named)


def served_in_turn(serving: Serving | None, tokens: int) -> int | None:
    """How many tokens have their copies picked one after another; `None` where none has to know of others."""
    return tokens if isinstance(serving, LeastWork) else None


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


def _together(
    copies: Copies, layer: int, rule: LeastWork, experts: Int[np.ndarray, "token top_k"]
) -> Int[np.ndarray, "token top_k"]:
    """Token after token: the place among the copies of its experts where its hosts have done least, all together."""
    share = copies.share[layer].astype(np.float64)
    places = np.stack([np.flatnonzero(copies.copy_of[layer] == expert) for expert in range(copies.num_experts)], axis=1)
    work = np.zeros(share.shape[1])
    mean = (experts >= 0).sum() / len(work)  # of all nodes at the end
    named = np.full_like(experts, -1)
    for token, choices in enumerate(experts):
        chosen = choices[choices >= 0]
        if not len(chosen):
            continue
        costs = []
        for able in places[:, chosen]:
            hosts = np.flatnonzero(share[able].any(axis=0))
            reached = work + share[able].sum(axis=0)
            costs.append(rule.work[layer] * reached[hosts].max() / mean + rule.visits[layer] * len(hosts))
        able = places[np.flatnonzero(np.array(costs) <= min(costs) * (1 + ALIKE))[0], chosen]
        named[token, choices >= 0] = able
        work += share[able].sum(axis=0)
    return named
