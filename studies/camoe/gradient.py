"""The gate's bias by gradient beside one lambda, at equal gate mass retained; see README.md.

`python studies/camoe/gradient.py` writes `gradient.csv`: latency saved on training tokens, on unseen ones, and
on tokens of topics that training has not seen.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from setting import HERE, STRENGTHS, TOKENS_PER_NODE, network, problem, scores_of

from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.methods.camoe.bias_descent import FORMS, GateLimits, GateSettings, descend, start, within
from jaxmoe.methods.camoe.gate import evaluate_gate, on_experts
from jaxmoe.traces.statistics.concentration import avg_layer_cv, avg_layer_kl, global_cv, global_kl
from jaxmoe.traces.synthesis import PRESETS, sample_trace

NUM_LAYERS, SEED = 16, 0
PARTS, PART = 4, 1024  # batches to train on, and their tokens
UNSEEN, BATCH = 2, 4 * TOKENS_PER_NODE
SETTINGS = GateSettings(steps=80)
ALL_FORMS_AT = (0.15,)
MARGIN = 0.9  # of what the rule loses on training tokens: limits are to hold on unseen ones too


def trace(topics: slice, count: int, seed: int):
    """Tokens of some of the preset's 16 topics."""
    process = PRESETS["qwen3-30b-a3b"].process(layers=NUM_LAYERS)
    chosen = np.arange(16)[topics]
    requests = replace(process.requests, topics=chosen[process.requests.topics % len(chosen)])
    return sample_trace(replace(process, requests=requests), count, seed, logits=1.0)


def sets() -> dict[str, list]:
    """Batches by what they are for."""
    top = network()
    first, other = slice(0, 8), slice(8, 16)
    seen, unseen = trace(first, PARTS * PART, SEED), trace(first, UNSEEN * BATCH, SEED + 1)
    strange = trace(other, UNSEEN * BATCH, SEED + 2)
    return {
        "training": [problem(seen, at * PART, PART, top) for at in range(PARTS)],
        "unseen": [problem(unseen, at * BATCH, BATCH, top) for at in range(UNSEEN)],
        "other_topics": [problem(strange, at * BATCH, BATCH, top) for at in range(UNSEEN)],
    }


def figures(problems, bias, share) -> dict[str, float]:
    """Latency saved in %, and all that tells how far routing has changed."""
    none = jnp.zeros_like(on_experts(bias, problems[0].share))
    base = [evaluate_gate(each, none) for each in problems]
    after = [evaluate_gate(each, on_experts(bias, share), share) for each in problems]

    def mean(judged, name):
        return float(np.mean([getattr(one, name).mean() for one in judged]))

    before, loads = (np.sum([np.asarray(one.loads, float) for one in which], axis=0) for which in (base, after))
    return {
        "mean_ms": 1e3 * mean(after, "seconds"),
        "saved_percent": 100 * (1 - mean(after, "seconds") / mean(base, "seconds")),
        "retained": mean(after, "retained"),
        "changed": mean(after, "changed"),
        "kl": global_kl(before, loads),
        "avg_layer_kl": float(
            np.mean([avg_layer_kl(*map(np.asarray, (b.loads, a.loads))) for b, a in zip(base, after, strict=True)])
        ),
        "cv": global_cv(loads),
        "avg_layer_cv": avg_layer_cv(loads),
    }


def gradient() -> Iterator[dict]:
    batches = sets()
    training = batches["training"]
    share = training[0].share
    scores = jnp.stack([scores_of(each) for each in training]).mean(axis=0)

    def told(strength, form, bias) -> list[dict]:
        about = {"lambda": strength, "form": form}
        return [about | {"tokens": name} | figures(problems, bias, share) for name, problems in batches.items()]

    for strength in STRENGTHS[1:]:
        rule = told(strength, "rule", -strength * scores)
        yield from rule
        seen = next(row for row in rule if row["tokens"] == "training")
        limits = GateLimits(MARGIN * (1 - seen["retained"]), MARGIN * seen["avg_layer_kl"])
        for form in FORMS if strength in ALL_FORMS_AT else ("table",):
            found = descend(training, limits, SETTINGS, start(form, scores, strength))
            yield from told(strength, form, jnp.asarray(within(training, limits, found.bias, found.share)))


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    make_tables(HERE, tables_of({"gradient": gradient}, digits=6), study_options(__doc__).parse_args())
