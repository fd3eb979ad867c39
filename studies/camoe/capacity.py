"""Capacity limits (4.5): Tables 1 and 2 where an expert takes so many times the mean at most, in minutes of one core.

`python studies/camoe/capacity.py` writes `capacity.csv`. Tokens, biases and calibrated numbers are those of Table 1,
of one batch.
"""

from collections.abc import Iterator
from dataclasses import replace

from setting import HERE, LOGIT_SCALE, TOKENS_PER_NODE, tokens
from table1 import BATCHES, SEED, TOKENS, relative, rows

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.methods.camoe.gate import GateProblem, capacity_of

FACTORS = ("none", 8, 4, 2, 1.25)  # none is the paper's gate without limits
STRENGTHS = (0.0, 0.1, 0.25)


def capacity(factor: float | str) -> Iterator[dict[str, object]]:
    """Rows of a limit by lambda; changes are since lambda 0 under the same limit."""

    def limited(batch: GateProblem) -> GateProblem:
        size, count = len(batch.source), batch.logits.shape[2]
        return replace(
            batch, capacity=capacity_of(None if factor == "none" else float(factor), size, batch.top_k, count)
        )

    trace = tokens(BATCHES * TOKENS, SEED)
    made = rows(trace, "counted", TOKENS_PER_NODE, LOGIT_SCALE, STRENGTHS, sizes=(TOKENS,), change=limited)
    for row in made:
        told = {name: row[name] for name in ("mean_ms", "cv", "avg_layer_cv", "kl", "avg_layer_kl", "changed")}
        changes = {f"{name}_change_percent": relative(row, made[0], name) for name in ("mean_ms", "cv", "avg_layer_cv")}
        yield {"capacity_factor": factor, "lambda": row["lambda"]} | told | changes


if __name__ == "__main__":
    table = Table("capacity", capacity, [(factor,) for factor in FACTORS], ("capacity_factor",), digits=6)
    make_tables(HERE, [table], study_options(__doc__).parse_args())
