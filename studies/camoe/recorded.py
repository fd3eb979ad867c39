"""The biased gate on recorded choices whose logits are reconstructed from gate weights; see README.md.

`python studies/camoe/recorded.py` writes `recorded.csv`. It needs recorded traces, in `traces/` of `--shared`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from setting import HERE, ROOT, TOKENS_PER_NODE, costs, network, problem, scores_of

from jaxmoe.experiment.table import add_shared, make_tables, study_options, tables_of
from jaxmoe.methods.camoe.gate import GateProblem, evaluate_gate, on_experts, unbiased
from jaxmoe.traces import GatingTrace, read_trace
from jaxmoe.traces.logits import reconstruct_logits
from jaxmoe.traces.statistics.concentration import avg_layer_cv, avg_layer_kl, global_cv, global_kl

HIDDEN = {"deepseek-v2-lite": 2048, "gpt-oss-20b": 2880}  # elements of a vector
FILES = {
    "deepseek-v2-lite": ("intent", "summary", "translation"),
    "gpt-oss-20b": ("gpqa_main", "mmlu_test", "sorry_bench"),
}
GAPS = {"deepseek-v2-lite": (1.0,), "gpt-oss-20b": (0.1, 0.3, 1.0)}  # of which only those of unknown mass make use
STRENGTHS = (0.1, 0.25)
EVERY = 4  # of so many layers one


def logits_of(trace: GatingTrace, gaps: tuple[float, ...]) -> dict[str, np.ndarray]:
    """What logits may be, [token, layer, expert], by what is assumed of the unchosen; last the most of them."""
    found = {}
    for gap in gaps:
        made = reconstruct_logits(trace, gap)
        name = "unchosen mass known, by popularity" if made.known_mass else f"unchosen {gap:g} below"
        found[name] = made.trace.logits
    return found | {"bound: all unchosen just below": made.most}


def rows(folder: Path, model: str, name: str) -> list[dict]:
    """Traffic is accounted on the first half of the tokens; figures are of the second."""
    trace, top = read_trace(folder / model / f"{name}.npz"), network()
    trace = trace.select_layers(trace.layer_ids[::EVERY].tolist())
    half, made = trace.num_tokens // 2, []
    for label, logits in logits_of(trace, GAPS[model]).items():
        given = replace(trace, logits=logits)
        exchange = costs(top, experts=trace.num_experts, hidden=HIDDEN[model])
        seen, unseen = (
            replace(problem(given, first, half, top, TOKENS_PER_NODE, 1.0), exchange=exchange) for first in (0, half)
        )
        base = evaluate_gate(unseen, unbiased(unseen))
        for strength in STRENGTHS:
            bias = on_experts(-strength * scores_of(seen), seen.share)
            made.append({"model": model, "trace": name, "logits": label, "lambda": strength} | told(unseen, base, bias))
    return made


def told(given: GateProblem, base, bias) -> dict[str, float]:
    """Latency saved in %, and how far routing changes."""
    after = evaluate_gate(given, bias)
    before, loads = (np.asarray(each.loads, float) for each in (base, after))
    return {
        "unbiased_ms": 1e3 * float(base.seconds.mean()),
        "saved_percent": 100 * (1 - float(after.seconds.mean() / base.seconds.mean())),
        "retained": float(after.retained.mean()),
        "changed": float(after.changed.mean()),
        "kl": global_kl(before, loads),
        "avg_layer_kl": avg_layer_kl(before, loads),
        "cv_change_percent": 100 * (global_cv(loads) / global_cv(before) - 1),
        "avg_layer_cv_change_percent": 100 * (avg_layer_cv(loads) / avg_layer_cv(before) - 1),
    }


def recorded(folder: Path) -> list[dict]:
    return [row for model, names in FILES.items() for name in names for row in rows(folder, model, name)]


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    parser = study_options(__doc__)
    add_shared(parser, ROOT.parent / "shared", "traces")
    given = parser.parse_args()
    make_tables(HERE, tables_of({"recorded": partial(recorded, given.shared / "traces")}, digits=6), given)
