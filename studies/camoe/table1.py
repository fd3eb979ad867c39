"""Tables 1 and 2 of camoe: latency, selectivity and change of routing by lambda; see README.md.

`python studies/camoe/table1.py` writes `table1.csv`; `own_node.csv`, the own node's part in the scores, here and on an
even network; `few_tokens.csv`, KL where few tokens are counted; `token_homes.csv`, what changes where fewer tokens live
at the slow node, or it has other experts; `ranks.csv`, Table 2 counted on one node; or those that are named. With
`--calibrate` it prints how the two calibrated latencies depend on tokens and scale of logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from setting import HERE, LOGIT_SCALE, STRENGTHS, TOKENS_PER_NODE, network, problem, scores_of, tokens

from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.hardware import fully_connected
from jaxmoe.methods.camoe.gate import GateProblem, evaluate_gate, on_experts
from jaxmoe.traces.statistics.concentration import avg_layer_cv, avg_layer_kl, global_cv, global_kl

BATCHES, TOKENS = 2, 4 * TOKENS_PER_NODE
SEED = 0
OTHER_SCALES = (0.7, 0.8, 0.9, 1.0)  # with the own node left out
FEW = (96, 256, 1024)  # tokens of all nodes together
ON_A_RANK = (64, 128, 220, 512)  # tokens of one node
PAPER = {  # mean and p95 in ms; cv, avg_layer_cv, KL, avg_layer_kl
    0.00: (177.56, 235.51, 0.3368, 1.5118, 0.0, 0.0),
    0.05: (171.49, 220.88, 0.3379, 1.5122, 0.0006, 0.0098),
    0.10: (166.02, 209.50, 0.3437, 1.5137, 0.0023, 0.0213),
    0.15: (160.24, 208.43, 0.3525, 1.5132, 0.0053, 0.0321),
    0.20: (152.51, 197.80, 0.3622, 1.5108, 0.0097, 0.0447),
    0.25: (149.50, 190.57, 0.3742, 1.5079, 0.0149, 0.0588),
}
FIGURES = ("mean_ms", "p95_ms", "cv", "avg_layer_cv", "kl", "avg_layer_kl")


def rows(
    trace,
    own: str,
    per_node: int,
    scale: float,
    strengths=STRENGTHS,
    top=None,
    sizes=(TOKENS,) * BATCHES,
    change: Callable[[GateProblem], GateProblem] = lambda batch: batch,
) -> list[dict]:
    """One line for each lambda, of batches that `change` was done to."""
    top, ends = network() if top is None else top, np.cumsum((0, *sizes))
    batches = [
        change(problem(trace, int(at), size, top, per_node, scale)) for at, size in zip(ends, sizes, strict=False)
    ]
    scores = jnp.stack([scores_of(batch, own) for batch in batches]).mean(axis=0)
    made, base = [], None
    for strength in strengths:
        judged = [evaluate_gate(batch, on_experts(-strength * scores, batch.share)) for batch in batches]
        seconds = np.concatenate([np.asarray(one.seconds) for one in judged])
        # Tokens that were counted, however many each stands for: what smooths KL is one token.
        counted = [np.asarray(one.loads, float) / float(each.weight) for one, each in zip(judged, batches, strict=True)]
        loads = np.sum(counted, axis=0)
        base = loads if base is None else base
        mean, p95 = 1e3 * seconds.mean(), 1e3 * np.quantile(seconds, 0.95)
        found = (mean, p95, global_cv(loads), avg_layer_cv(loads), global_kl(base, loads), avg_layer_kl(base, loads))
        row = {"own_node": own, "lambda": strength} | dict(zip(FIGURES, map(float, found), strict=True))
        row |= {name: float(np.mean([getattr(one, name).mean() for one in judged])) for name in ("retained", "changed")}
        row |= {f"paper_{name}": value for name, value in zip(FIGURES, PAPER[strength], strict=True)}
        made.append(row)
    return made


def relative(row: dict, first: dict, name: str) -> float:
    """Change since lambda 0, %."""
    return float(100 * (row[name] / first[name] - 1))


def own_node() -> list[dict]:
    """The own node in the scores, left out of them, and its part alone; on A.3 and where all pairs are alike.

    Left out, also with other scales of logits: one figure, the latency at lambda 0.25, calibrates it in either way.
    """
    trace, even = tokens(BATCHES * TOKENS, SEED), fully_connected(4, 1.25e9, 6e-4)
    cases = [("camoe_4nodes", network(), own, LOGIT_SCALE) for own in ("counted", "left_out", "alone")]
    cases += [("camoe_4nodes", network(), "left_out", scale) for scale in OTHER_SCALES]
    cases += [("even", even, own, LOGIT_SCALE) for own in ("counted", "left_out", "alone")]
    made = []
    for name, top, own, scale in cases:
        first, *some = rows(trace, own, TOKENS_PER_NODE, scale, (0.0, 0.1, 0.25), top)
        for row in some:
            told = {"network": name, "own_node": own, "logit_scale": scale, "lambda": row["lambda"]}
            told |= {f"{key}_change_percent": relative(row, first, key) for key in ("mean_ms", "p95_ms", "cv")}
            told |= {key: row[key] for key in ("avg_layer_cv", "kl", "avg_layer_kl", "retained", "changed")}
            made.append(told)
    return made


def few_tokens() -> list[dict]:
    """KL and avg_layer_kl where so many tokens are counted in all."""
    trace = tokens(max(FEW), SEED)
    cases = [(own, scale, size) for own, scale in (("counted", LOGIT_SCALE), ("left_out", 0.9)) for size in FEW]
    made = []
    for own, scale, size in cases:
        for row in rows(trace, own, TOKENS_PER_NODE, scale, sizes=(size,)):
            told = {"own_node": own, "logit_scale": scale, "tokens": size}
            made.append(
                told | {key: row[key] for key in ("lambda", "kl", "avg_layer_kl", "paper_kl", "paper_avg_layer_kl")}
            )
    return made


def token_homes() -> list[dict]:
    """Where fewer tokens live at node 0, all of whose links are slow, and where it has the experts of another node."""
    trace = tokens(TOKENS, SEED)

    def at_node_0(part: float, batch: GateProblem) -> GateProblem:
        token = np.arange(len(batch.source))
        return replace(batch, source=jnp.asarray(np.where(token < part * len(token), 0, 1 + token % 3), jnp.int32))

    def other_experts(nodes: int, batch: GateProblem) -> GateProblem:
        return replace(batch, logits=jnp.roll(batch.logits, nodes * batch.logits.shape[2] // 4, axis=2))

    cases = [(0.25, moved, lambda batch, moved=moved: other_experts(moved, batch)) for moved in range(4)]
    cases += [(part, 0, lambda batch, part=part: at_node_0(part, batch)) for part in (0.1, 0.0)]
    made = []
    for part, moved, change in cases:
        first, *some = rows(
            trace, "counted", TOKENS_PER_NODE, LOGIT_SCALE, (0.0, 0.1, 0.25), sizes=(TOKENS,), change=change
        )
        for row in some:
            told = {"part_of_tokens_at_node_0": part, "experts_moved_by_nodes": moved, "lambda": row["lambda"]}
            told |= {f"{key}_change_percent": relative(row, first, key) for key in ("mean_ms", "p95_ms", "cv")}
            made.append(told | {key: row[key] for key in ("avg_layer_cv", "kl", "avg_layer_kl", "retained", "changed")})
    return made


def ranks() -> list[dict]:
    """Table 2 counted on the tokens of one node, of all nodes but node 0, and of all; nothing is calibrated anew.

    Without a number of tokens all that live there in both batches are counted. Biases are those of table 1.
    """
    trace, top = tokens(BATCHES * TOKENS, SEED), network()
    batches = [problem(trace, number * TOKENS, TOKENS, top) for number in range(BATCHES)]
    scores = jnp.stack([scores_of(batch) for batch in batches]).mean(axis=0)
    counted = {"all": range(4)} | {str(node): (node,) for node in range(4)} | {"1 to 3": (1, 2, 3)}
    cases = [(name, None) for name in counted] + [(str(node), size) for node in range(1, 4) for size in ON_A_RANK]
    made = []
    for name, size in cases:
        parts = [tokens_of_nodes(batch, counted[name], size) for batch in batches[: 1 if size else BATCHES]]
        loads = {
            strength: sum(
                np.asarray(evaluate_gate(part, on_experts(-strength * scores, part.share)).loads) for part in parts
            )
            for strength in STRENGTHS
        }
        first = {"cv": global_cv(loads[0.0]), "avg_layer_cv": avg_layer_cv(loads[0.0])}
        for strength, each in loads.items():
            row = {"counted_on": name, "tokens": sum(len(part.source) for part in parts), "lambda": strength}
            row |= {"cv": float(global_cv(each)), "avg_layer_cv": float(avg_layer_cv(each))}
            row |= {f"{key}_change_percent": relative(row, first, key) for key in first}
            row |= {"kl": float(global_kl(loads[0.0], each)), "avg_layer_kl": float(avg_layer_kl(loads[0.0], each))}
            told = dict(zip(FIGURES, PAPER[strength], strict=True))
            start = dict(zip(FIGURES, PAPER[0.0], strict=True))
            row |= {f"paper_{key}_change_percent": relative(told, start, key) for key in first}
            made.append(row | {f"paper_{key}": told[key] for key in ("kl", "avg_layer_kl")})
    return made


def tokens_of_nodes(batch: GateProblem, nodes: Sequence[int], count: int | None) -> GateProblem:
    """The tokens of some nodes alone, at most so many of them, each counted once."""
    kept = np.flatnonzero(np.isin(batch.source, list(nodes)))[:count]
    return replace(batch, logits=batch.logits[:, kept], source=batch.source[kept], weight=jnp.ones(()))


def table1() -> list[dict]:
    """Both tables of the paper, and the same with the own node left out of the scores."""
    trace, made = tokens(BATCHES * TOKENS, SEED), []
    for own in ("counted", "left_out"):
        made += rows(trace, own, TOKENS_PER_NODE, LOGIT_SCALE)
    for row in made:
        first = next(one for one in made if one["own_node"] == row["own_node"])
        for name in ("mean_ms", "p95_ms"):
            row[f"{name}_change_percent"] = relative(row, first, name)
            row[f"paper_{name}_change_percent"] = 100 * (row[f"paper_{name}"] / first[f"paper_{name}"] - 1)
    return made


def calibrate() -> None:
    trace = tokens(BATCHES * TOKENS, SEED)
    for per_node in (TOKENS_PER_NODE - 30, TOKENS_PER_NODE + 30):
        for scale in (LOGIT_SCALE - 0.1, LOGIT_SCALE + 0.1):
            first, last = rows(trace, "counted", per_node, scale, (0.0, 0.25))
            print(per_node, scale, f"{first['mean_ms']:.2f} ms, {relative(last, first, 'mean_ms'):.2f} %", flush=True)


TABLES = {"table1": table1, "own_node": own_node, "few_tokens": few_tokens, "token_homes": token_homes, "ranks": ranks}

if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    parser = study_options(__doc__)
    parser.add_argument("--calibrate", action="store_true")
    options = parser.parse_args()
    if options.calibrate:
        calibrate()
    else:
        make_tables(HERE, tables_of(TABLES, digits=6), options)
