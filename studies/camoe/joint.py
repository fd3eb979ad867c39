"""Bias and placement, alone, in turn and at once, on three networks; see README.md.

`python studies/camoe/joint.py` writes `joint.csv`; with `--only wafer/0` the rows of a network and seed alone.
Placements keep as many experts on every node.
"""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from setting import HERE, TOKENS_PER_NODE, network, problem, scores_of, tokens

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.hardware import wafers
from jaxmoe.methods.camoe.bias_descent import (
    Bias,
    Found,
    GateLimits,
    GateSettings,
    RelaxedPlacement,
    descend,
    fastest,
    start,
    tuned_bias,
)
from jaxmoe.methods.camoe.gate import GateProblem, divergence, evaluate_gate, on_experts, unbiased

jax.config.update("jax_default_matmul_precision", "highest")  # also in processes of `--jobs`

NUM_LAYERS, SEEDS, STRENGTH, MARGIN = 4, (0, 1, 2), 0.2, 0.95
PARTS, PART, HELD, UNSEEN = 4, 2048, 4096, 4096
DRAWN = 65536  # tokens of about 80 requests, of which batches have some of all
BIAS = GateSettings(steps=40)
PLACE = GateSettings(steps=40, learning_rate=0.1)
BOTH = GateSettings(steps=40, learning_rate=0.05)
NODES_TOKENS = {"camoe_4nodes": TOKENS_PER_NODE, "spine_leaf": 190, "wafer": 190}  # as many tokens on 4 nodes as on 32


def placed_like(share: np.ndarray, strength: float) -> RelaxedPlacement:
    """A relaxed placement whose logits are `strength` times the given shares."""
    return RelaxedPlacement(strength * jnp.asarray(share, jnp.float32))


def networks():
    """A.3, 8 leaves of 4 nodes, and a wafer of 4x8 dies with links of 1 TB/s."""
    return {
        "camoe_4nodes": network(),
        "spine_leaf": network("spine_leaf"),
        "wafer": wafers((4, 8), (1, 1), 1e12, 1e-7, 1e12, 1e-7),
    }


def corners(training, held, unseen, name: str):
    """One line for each corner: a bias, a placement, both in turn, both at once; all chosen on held tokens."""
    share = np.asarray(training[0].share)
    none = np.zeros((NUM_LAYERS, unseen.num_nodes, unseen.num_nodes), np.float32)

    def at(placement):
        return [replace(each, share=jnp.asarray(placement)) for each in training]

    def rule(placement) -> Bias:
        return start("table", jnp.stack([scores_of(each) for each in at(placement)]).mean(axis=0), STRENGTH)

    begin = rule(share)
    kept = [evaluate_gate(each, on_experts(begin.nodes(), jnp.asarray(share))).retained.mean() for each in training]
    limits = GateLimits(MARGIN * (1 - float(np.mean(kept))))

    def bias(placement) -> Found:
        return tuned_bias(at(placement), held, limits, BIAS, rule(placement))

    given = Found(none, share, np.zeros((0, 3)))
    alone = bias(share)
    placement = fastest(held, [given, descend(training, limits, PLACE, None, placed_like(share, 0.1))])
    in_turn = bias(placement.share)
    # At once from what is best so far, bias and placement; then the bias anew on the rounded placement.
    best = fastest(held, [in_turn, alone])
    both = descend(at(best.share), limits, BOTH, rule(best.share), placed_like(best.share, 0.3))
    at_once = fastest(held, [best, bias(both.share)])
    ruled = replace(given, bias=np.asarray(begin.nodes()))
    made = {"neither": given, "rule": ruled, "bias": alone, "placement": placement, "in_turn": in_turn}
    for corner, found in (made | {"at_once": at_once}).items():
        yield {"network": name, "corner": corner} | figures(replace(unseen, share=jnp.asarray(found.share)), found.bias)


def figures(given, bias) -> dict[str, float]:
    """Latency on these tokens, and how far routing changes."""
    after = evaluate_gate(given, on_experts(jnp.asarray(bias), given.share))
    return {
        "mean_ms": 1e3 * float(after.seconds.mean()),
        "retained": float(after.retained.mean()),
        "changed": float(after.changed.mean()),
        "avg_layer_kl": float(divergence(evaluate_gate(given, unbiased(given)).loads, after.loads).mean()),
    }


def batches(seed: int, sizes: list[int], top, per_node: int) -> list[GateProblem]:
    """Batches of about 80 requests each, the same for all, whose tokens live on nodes by chance."""
    trace, rng = tokens(DRAWN, seed, layers=NUM_LAYERS), np.random.default_rng(seed)
    made = []
    for some in np.split(rng.permutation(DRAWN)[: sum(sizes)], np.cumsum(sizes)[:-1]):
        batch = problem(trace.select_tokens(np.sort(some)), 0, len(some), top, per_node)
        made.append(replace(batch, source=jnp.asarray(rng.permutation(batch.source))))
    return made


def joint(name: str, seed: int) -> list[dict]:
    top, per_node = networks()[name], NODES_TOKENS[name]
    *training, held = batches(seed, [*[PART] * PARTS, HELD], top, per_node)
    (unseen,) = batches(seed + 1000, [UNSEEN], top, per_node)  # of other requests
    return [{"seed": seed} | row for row in corners(training, [held], unseen, name)]


TABLE = Table("joint", joint, [*product(NODES_TOKENS, SEEDS)], ("network", "seed"))

if __name__ == "__main__":
    make_tables(HERE, [TABLE], study_options(__doc__).parse_args())
