"""Bias and placement, alone, in turn and at once, on three networks; see README.md.

`python studies/camoe/joint.py` writes `joint.csv`. Placements keep as many experts on every node.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from setting import TOKENS_PER_NODE, contiguous, network, problem, scores_of, tokens, write_rows

from jaxmoe.hardware import wafers
from jaxmoe.tune.gate_bias import (
    GateSettings,
    Limits,
    descend,
    divergence,
    judge,
    on_experts,
    placed_like,
    start,
    within,
)

NUM_LAYERS, SEED, STRENGTH, MARGIN = 4, 0, 0.2, 0.95
PARTS, PART, UNSEEN = 2, 2048, 4096
BIAS = GateSettings(steps=40)
PLACE = GateSettings(steps=40, learning_rate=0.1)
BOTH = GateSettings(steps=40, learning_rate=0.05)
NODES_TOKENS = {"camoe_4nodes": TOKENS_PER_NODE, "spine_leaf": 190, "wafer": 190}  # as many tokens on 4 nodes as on 32


def networks():
    """A.3, 8 leaves of 4 nodes, and a wafer of 4x8 dies with links of 1 TB/s."""
    return {
        "camoe_4nodes": network(),
        "spine_leaf": network("spine_leaf"),
        "wafer": wafers((4, 8), (1, 1), 1e12, 1e-7, 1e12, 1e-7),
    }


def corners(training, unseen, name: str):
    """One line for each corner: a bias, a placement, both in turn, both at once."""
    share = training[0].share
    scores = jnp.stack([scores_of(each) for each in training]).mean(axis=0)
    none = np.zeros(scores.shape, np.float32)
    rule = np.mean([judge(each, on_experts(-STRENGTH * scores, share)).retained.mean() for each in training])
    limits = Limits(1 - float(rule))

    def tuned(problems, bias, place, settings):
        found = descend(problems, Limits(MARGIN * limits.lost), settings, bias, place)
        return found.bias, found.share

    def at(placement):
        return [replace(each, share=jnp.asarray(placement)) for each in training]

    def kept(bias, placement):
        return within(at(placement), Limits(MARGIN * limits.lost), bias, placement)

    alone, _ = tuned(training, start("table", scores, STRENGTH), None, BIAS)
    _, placed = tuned(training, None, placed_like(share, 0.1), PLACE)
    placed_scores = jnp.stack([scores_of(each) for each in at(placed)]).mean(axis=0)
    in_turn, _ = tuned(at(placed), start("table", placed_scores, STRENGTH), None, BIAS)
    # At once, from the placement found alone; then the bias has the rounded placement for as many steps.
    _, together = tuned(at(placed), start("table", placed_scores, STRENGTH), placed_like(placed, 0.3), BOTH)
    last_scores = jnp.stack([scores_of(each) for each in at(together)]).mean(axis=0)
    last, _ = tuned(at(together), start("table", last_scores, STRENGTH), None, BIAS)
    made = {
        "neither": (none, np.asarray(share)),
        "rule": (np.asarray(-STRENGTH * scores), np.asarray(share)),
        "bias": (kept(alone, share), np.asarray(share)),
        "placement": (none, placed),
        "in_turn": (kept(in_turn, placed), placed),
        "at_once": (kept(last, together), together),
    }
    for corner, (bias, placement) in made.items():
        given = replace(unseen, share=jnp.asarray(placement))
        judged = judge(given, on_experts(jnp.asarray(bias), given.share))
        base = judge(given, jnp.zeros_like(on_experts(jnp.asarray(bias), given.share)))
        yield {
            "network": name,
            "corner": corner,
            "mean_ms": 1e3 * float(judged.seconds.mean()),
            "retained": float(judged.retained.mean()),
            "changed": float(judged.changed.mean()),
            "avg_layer_kl": float(divergence(base.loads, judged.loads).mean()),
        }


def main() -> None:
    trace = tokens(PARTS * PART + UNSEEN, SEED, layers=NUM_LAYERS)
    rows = []
    for name, top in networks().items():
        per_node = NODES_TOKENS[name]
        training = [problem(trace, at * PART, PART, top, per_node) for at in range(PARTS)]
        unseen = problem(trace, PARTS * PART, UNSEEN, top, per_node)
        assert contiguous(top.num_nodes, NUM_LAYERS).shape == training[0].share.shape
        for row in corners(training, unseen, name):
            rows.append(row)
            print(
                {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
        write_rows("joint", rows)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
