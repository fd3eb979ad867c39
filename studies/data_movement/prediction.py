"""Which experts real tokens choose, predicted from history: every predictor beside frequency alone; see README.md.

Fits predictors on one part of the real traces and scores them on another, apart in two ways: by sequences inside
a file, and across topics of a model. Writes `prediction.csv` (recall and load errors of every predictor, mean over
layers), `prediction_sets.csv` (the paper's rule of the top experts of each row) and `prediction.json` (settings).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from load_scoring import batch_loads, load_error, set_recall, top_of_rows, window_loads

import jaxmoe
from jaxmoe.experiment.table import add_shared, folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.traces import GatingTrace, read_trace
from jaxmoe.traces.prediction import (
    AbstractHeatmap,
    AbstractPredictor,
    Perfect,
    TokenHistory,
    fit,
    history,
    ranks,
    recall,
    split_sequences,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASELINE = "frequency"
LIMITS = ("random", BASELINE, "perfect")
JUDGED = ("recall_K", "late_recall_K", "batch_error", "window_error")  # beside frequency alone
MEASURES = ("recall_K", "recall_2K", "recall_4K", "late_recall_K", "late_recall_2K", "batch_error", "window_error")


@dataclass(frozen=True)
class Settings:
    """What was chosen: priors on the training half of the sequences only, the rest beforehand."""

    seed: int = 0
    train_share: float = 0.5  # of a file's sequences
    prefill_tokens: int = 128  # of a request; late recall is of the tokens after them
    rate: float = 0.05
    window: int = 64
    prior: float = 10.0
    prefill_prior: float = 100.0
    batch_tokens: int = 64  # of a batch and of a window whose load is predicted


@dataclass(frozen=True)
class Trial:
    """Files to fit on and to score on; a file of the same name is split by sequences."""

    model: str
    fitted_on: str
    scored_on: str

    @property
    def apart(self) -> str:
        return "sequences" if self.fitted_on == self.scored_on else "topics"

    def traces(self, folder: Path, settings: Settings) -> tuple[GatingTrace, GatingTrace]:
        """What to fit on and what to score on. Mixtral's second turns run the first again: left out."""
        fitted_on, scored_on = (
            read_trace(folder / self.model / f"{name}.npz").without_repeats()
            for name in (self.fitted_on, self.scored_on)
        )
        if self.apart == "topics":
            return fitted_on, scored_on
        return split_sequences(fitted_on, settings.train_share, settings.seed)


TRIALS = (
    Trial("deepseek-v2-lite", "summary", "summary"),
    Trial("deepseek-v2-lite", "translation", "summary"),
    Trial("deepseek-v2-lite", "intent", "summary"),
    Trial("gpt-oss-20b", "gpqa_main", "gpqa_main"),
    Trial("gpt-oss-20b", "mmlu_test", "gpqa_main"),
    Trial("gpt-oss-20b", "sorry_bench", "gpqa_main"),
    Trial("mixtral-8x7b", "reasoning", "reasoning"),
    Trial("mixtral-8x7b", "math", "reasoning"),
    Trial("mixtral-8x7b", "writing", "reasoning"),
)


def rows_of(trial: Trial, folder: Path, settings: Settings) -> tuple[list[dict], list[dict]]:
    """Every predictor of one trial, and the paper's sets."""
    learned, scored = trial.traces(folder, settings)
    predictors = fit(
        learned,
        rate=settings.rate,
        window=settings.window,
        prior=settings.prior,
        prefill_prior=settings.prefill_prior,
        seed=settings.seed,
    )
    tokens = history(scored, settings.prefill_tokens)
    where = asdict(trial) | {
        "apart": trial.apart,
        "fitted_tokens": learned.num_tokens,
        "scored_tokens": scored.num_tokens,
    }
    measured = {name: measures(predictor, tokens, settings) for name, predictor in predictors.items()}
    table = [
        where
        | {"predictor": name}
        | {measure: "" if np.isnan(value) else f"{value:.4f}" for measure, value in zip(MEASURES, values, strict=True)}
        for name, values in measured.items()
    ]
    return table, [where | row for row in set_rows(predictors, tokens)]


def measures(predictor: AbstractPredictor, tokens: TokenHistory, settings: Settings) -> list[float]:
    """`MEASURES` of one predictor, mean over layers; NaN for what it cannot be asked.

    Recall at n of K, 2 K and 4 K, then at K and 2 K of the tokens after the prefill only; error of the loads of
    batches, from predictions for each of their tokens; and of windows, forecast at their first token.
    """
    top_k, size = tokens.experts.shape[-1], settings.batch_tokens
    rank, late = ranks(predictor, tokens), ~tokens.prefill
    found = [recall(rank, n * top_k) for n in (1, 2, 4)] + [recall(rank, n * top_k, late) for n in (1, 2)]
    batches = len(tokens.start) // size
    # A batch in decode is of tokens of many requests, so they are dealt at random.
    dealt = np.random.default_rng(settings.seed).permutation(len(tokens.start)) // size
    batch = jnp.asarray(np.where(dealt < batches, dealt, -1))
    of_batches = load_error(*batch_loads(predictor, tokens, batch, batches))
    of_windows = load_error(*window_loads(predictor, tokens, size))
    if isinstance(predictor, Perfect):  # which knows the first token of a window, not the window
        of_windows = jnp.full_like(of_windows, jnp.nan)
    return [float(jnp.mean(by_layer)) for by_layer in (*found, of_batches, of_windows)]


def set_rows(predictors: dict[str, AbstractPredictor], tokens: TokenHistory) -> Iterator[dict]:
    """Recall and size of the sets that the top experts of each row make, beside the ranking at the same size."""
    for name, predictor in predictors.items():
        if isinstance(predictor, AbstractHeatmap):
            rank = ranks(predictor, tokens)
            for n in (1, 2, 3, 4):
                found, size = (float(jnp.mean(by_layer)) for by_layer in set_recall(top_of_rows(predictor, n), tokens))
                yield {
                    "predictor": name,
                    "top_of_row": n,
                    "set_size": f"{size:.2f}",
                    "set_recall": f"{found:.4f}",
                    "ranking_recall": f"{ranking_recall(rank, size):.4f}",
                }


def ranking_recall(rank: jax.Array, size: float) -> float:
    """Recall of the best-ranked experts, between the whole numbers around a size."""
    below = int(size)
    lower, upper = (float(jnp.mean(recall(rank, n))) for n in (below, below + 1))
    return lower + (size - below) * (upper - lower)


def write_summary(to: Path, settings: Settings, rows: list[dict]) -> None:
    """Settings, versions, and where a predictor does not beat frequency alone."""
    keys = ("model", "fitted_on", "scored_on", "predictor", "measure", "value", "frequency")
    summary = {
        "settings": asdict(settings),
        "trials": [asdict(trial) for trial in TRIALS],
        "versions": {"jaxmoe": jaxmoe.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "device": jax.devices()[0].platform,
        "not_better_than_frequency": [{key: row[key] for key in keys} for row in not_better(rows)],
    }
    aside = to / "prediction.json.part"
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    aside.replace(to / "prediction.json")


def not_better(rows: Iterable[dict]) -> Iterator[dict]:
    """Predictors, limits apart, that are no better than frequency alone in a measure: theirs and its values."""
    alone = {}
    for row in rows:  # frequency comes before what it is compared with
        if row["predictor"] == BASELINE:
            alone = row
        elif row["predictor"] not in LIMITS:
            for measure in JUDGED:
                ahead = float(row[measure]) - float(alone[measure])
                if (-ahead if measure.endswith("error") else ahead) <= 0:
                    yield row | {"measure": measure, "value": row[measure], "frequency": alone[measure]}


def report(rows: list[dict]) -> None:
    """The table for people."""
    print(f"{'predictor':22}" + "".join(f"{measure:>16}" for measure in MEASURES))
    for row in rows:
        if row["predictor"] == "random":
            print(f"\n{row['model']}: fitted on {row['fitted_on']}, scored on {row['scored_on']}, by {row['apart']}")
        print(f"{row['predictor']:22}" + "".join(f"{row[measure]:>16}" for measure in MEASURES))
    print("\nNot better than frequency alone:")
    for row in not_better(rows):
        print("  {model}, {fitted_on} to {scored_on}: {predictor}, {measure} {value} ({frequency})".format(**row))


def main() -> None:
    """Run all trials, write the tables."""
    parser = script_options(__doc__, writes=True)
    add_shared(parser, ROOT.parent / "shared", "traces")
    given = parser.parse_args()
    folder, to = given.shared / "traces", folder_of_tables(HERE, given)
    settings = Settings()
    done = [rows_of(trial, folder, settings) for trial in TRIALS]
    rows = [row for table, _ in done for row in table]
    write_table(to / "prediction.csv", rows)
    write_table(to / "prediction_sets.csv", [row for _, sets in done for row in sets])
    write_summary(to, settings, rows)
    report(rows)


if __name__ == "__main__":
    main()
