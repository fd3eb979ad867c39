"""Fig. 3: how uneven, how changing, how related and how predictable the choices of experts are."""

from pathlib import Path

import numpy as np
from cases import DEEPSEEK, LAYERS, MIXTRAL, SEED, trace_file

from jaxmoe.traces import GatingTrace, read_trace
from jaxmoe.traces.prediction import fit, history, ranks, recall, split_sequences

PREDICTORS = ("frequency", "repeat last", "next token", "next layer")


def activation(model: str, shared: Path) -> list[dict]:
    """Rows of all four panels: `figure` 3a to 3d, `layer`, one or two indices, and a value."""
    trace = read_trace(trace_file(model, shared))
    middle = list(trace.layer_ids).index(int(LAYERS[model]))
    rows = [
        *_frequencies(trace, middle),
        *_overlaps(trace),
        *_affinity(trace, middle),
        *(_accuracy(trace) if len(trace.seq_start) > 1 else ()),
    ]
    return [{"model": model} | row for row in rows]


def _row(figure: str, layer: int, name: object, other: object, value: float) -> dict:
    return {"figure": figure, "layer": layer, "name": name, "other": other, "value": f"{value:.6f}"}


def _frequencies(trace: GatingTrace, middle: int) -> list[dict]:
    """3a: the part of tokens that choose each expert, in the middle layer and in the most uneven one."""
    counts = _choices(trace).mean(axis=0)
    uneven = int(counts.max(axis=1).argmax())
    return [
        _row("3a", int(trace.layer_ids[layer]), expert, "", counts[layer, expert])
        for layer in dict.fromkeys((middle, uneven))
        for expert in range(trace.num_experts)
    ]


def _overlaps(trace: GatingTrace) -> list[dict]:
    """3b: the part of a token's experts that the token after it chooses as well, by layer, and by chance."""
    chosen = _choices(trace)
    follows = np.ones(trace.num_tokens, bool)
    follows[np.asarray(trace.seq_start)] = False
    same = (chosen[1:] * chosen[:-1]).sum(axis=2)[follows[1:]].mean(axis=0) / trace.top_k
    chance = (chosen.mean(axis=0) ** 2).sum(axis=1) / trace.top_k
    return [
        _row("3b", int(layer), name, "", value)
        for name, values in (("measured", same), ("by chance", chance))
        for layer, value in zip(trace.layer_ids, values, strict=True)
    ]


def _affinity(trace: GatingTrace, layer: int) -> list[dict]:
    """3c: the probability that expert j is chosen given that i is, in the middle layer."""
    chosen = _choices(trace)[:, layer]
    together = chosen.T @ chosen / np.maximum(chosen.sum(axis=0), 1)[:, None]
    return [
        _row("3c", int(trace.layer_ids[layer]), given, other, together[given, other])
        for given in range(trace.num_experts)
        for other in range(trace.num_experts)
    ]


def _accuracy(trace: GatingTrace) -> list[dict]:
    """3d: the part of a token's experts that are among the K predicted, on requests that were not fitted."""
    known, unseen = split_sequences(trace, 0.5, SEED)
    predictors, tokens = fit(known), history(unseen, 0)
    rows = []
    for name in PREDICTORS:
        found = np.asarray(recall(ranks(predictors[name], tokens), trace.top_k))
        rows += [_row("3d", int(layer), name, "", value) for layer, value in zip(trace.layer_ids, found, strict=True)]
    return rows


def _choices(trace: GatingTrace) -> np.ndarray:
    """1 where a token chose an expert, float32 [token, layer, expert]."""
    made = np.zeros((trace.num_tokens, len(trace.layer_ids), trace.num_experts), np.float32)
    np.put_along_axis(made, np.asarray(trace.experts, np.int64), 1, axis=2)
    return made


JOBS = {f"activation_{model}": lambda shared, model=model: activation(model, shared) for model in (MIXTRAL, DEEPSEEK)}
