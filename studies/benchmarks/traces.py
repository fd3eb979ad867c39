"""Tokens per second of the statistics of a trace that is read from a file, beside a NumPy loop; see README.md.

The trace has 58 layers of 256 experts, of which a token chooses 8, as DeepSeek-V3. It is made in parts, so that
neither it nor its file is ever in memory as a whole. Compilation is timed apart, on the first tokens. The NumPy loop
counts the same events of the first tokens, layer by layer with `bincount`, and must find the same counts.
"""

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
from throughput import machine

from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.traces import GatingTrace, read_trace, synthetic_trace, write_trace_in_parts
from jaxmoe.traces.statistics import PairCounts, count_pairs, count_shuffled, summarise
from jaxmoe.traces.statistics.counting import CHUNK_TOKENS

HERE = Path(__file__).resolve().parent
LAYERS, EXPERTS, TOP_K = 58, 256, 8
PART_TOKENS = 65_536
POOL_TOKENS = 8192  # different tokens: to draw all anew would take far longer than to count them
SEQUENCE_TOKENS = 512
RUNS = 3  # of what takes seconds, since other work on the machine can only slow a run down

Result = TypeVar("Result")


def parts(tokens: int) -> Iterator[np.ndarray]:
    """A trace of skewed choices, sequence after sequence taken from a pool."""
    pool = synthetic_trace(POOL_TOKENS, range(LAYERS), EXPERTS, TOP_K, skew=0.6, coactivation=0.3, reuse=0.2, seed=0)
    sequences = pool.experts.reshape(-1, SEQUENCE_TOKENS, LAYERS, TOP_K)
    rng = np.random.default_rng(0)
    for start in range(0, tokens, PART_TOKENS):
        drawn = sequences[rng.integers(len(sequences), size=PART_TOKENS // SEQUENCE_TOKENS)]
        yield drawn.reshape(PART_TOKENS, LAYERS, TOP_K)[: tokens - start]


def first_tokens(trace: GatingTrace, tokens: int) -> GatingTrace:
    """The first tokens, in memory."""
    return trace.select_tokens(np.arange(min(tokens, trace.num_tokens)))


def numpy_counts(trace: GatingTrace) -> dict[str, np.ndarray]:
    """Counts of a trace in memory, whose choices are all there, layer by layer."""
    experts, first = trace.experts.astype(np.int64), np.zeros(trace.num_tokens, bool)
    first[trace.seq_start] = True
    one, other = np.triu_indices(TOP_K, 1)

    def tally(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.bincount((a * EXPERTS + b).ravel(), minlength=EXPERTS**2).reshape(EXPERTS, EXPERTS)

    layers: dict[str, list[np.ndarray]] = {name: [] for name in ("load", "token_pairs", "layer_pairs", "together")}
    for layer in range(LAYERS):
        here, ordered = experts[:, layer], np.sort(experts[:, layer], axis=1)
        layers["load"].append(np.bincount(here.ravel(), minlength=EXPERTS))
        linked = np.flatnonzero(~first[1:])
        layers["token_pairs"].append(tally(here[linked, :, None], here[linked + 1, None, :]))
        layers["together"].append(tally(ordered[:, one], ordered[:, other]))
        if layer + 1 < LAYERS:
            layers["layer_pairs"].append(tally(here[:, :, None], experts[:, layer + 1, None, :]))
    return {name: np.stack(tables) for name, tables in layers.items()}


def timed(run: Callable[[], Result], runs: int = 1) -> tuple[Result, float]:
    """The result, and the seconds of the best of several runs."""
    best = np.inf
    for _ in range(runs):
        begun = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - begun)
    return result, best


def check(counts: PairCounts, expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(counts, name), values, err_msg=name)


def measure(tokens: int, folder: Path) -> dict[str, object]:
    """The row of the table."""
    path = folder / "trace.npz"
    write_trace_in_parts(
        path,
        parts(tokens),
        num_tokens=tokens,
        num_experts=EXPERTS,
        top_k=TOP_K,
        layer_ids=range(LAYERS),
        facts={},
        seq_start=np.arange(0, tokens, SEQUENCE_TOKENS),
    )
    trace, read_s = timed(lambda: read_trace(path))
    sample = first_tokens(trace, CHUNK_TOKENS)
    counts, first_s = timed(lambda: count_pairs(sample))
    _, again_s = timed(lambda: count_pairs(sample), RUNS)
    expected, numpy_s = timed(lambda: numpy_counts(sample), RUNS)
    check(counts, expected)
    counts, count_s = timed(lambda: count_pairs(trace))
    shuffled, shuffle_s = timed(lambda: count_shuffled(trace, seed=0))
    summary, summary_s = timed(lambda: summarise(trace.layer_ids, TOP_K, counts, shuffled, seed=0))
    print({name: f"{value:.3f}" for name, value in summary.mean().items() if value is not None})
    numpy_rate = sample.num_tokens / numpy_s
    return {
        "tokens": tokens,
        "layers": LAYERS,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "file_GB": f"{path.stat().st_size / 1e9:.2f}",
        "read_and_check_s": f"{read_s:.1f}",
        "compile_s": f"{first_s - again_s:.2f}",
        "count_s": f"{count_s:.1f}",
        "shuffle_s": f"{shuffle_s:.1f}",
        "summary_s": f"{summary_s:.1f}",
        "counted_tokens_per_s": round(tokens / count_s),
        "all_tokens_per_s": round(tokens / (read_s + count_s + shuffle_s + summary_s)),
        "numpy_tokens_per_s": round(numpy_rate),
        "count_over_numpy": f"{tokens / count_s / numpy_rate:.1f}",
        "peak_memory_GiB": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",  # it is in KiB
    }


def main() -> None:
    """Measure, print the row and write it."""
    options = script_options(__doc__, writes=True)
    options.add_argument("--tokens", type=lambda text: int(float(text)), default=10_000_000, help="such as 1e6")
    options.add_argument("--folder", type=Path, help="where the file of 0.93 GB per million tokens goes for a while")
    chosen = options.parse_args()
    with TemporaryDirectory(dir=chosen.folder) as folder:
        row = measure(chosen.tokens, Path(folder))
    print(row)
    print(machine())
    write_table(folder_of_tables(HERE, chosen) / "traces.csv", [row | {"machine": machine()}])


if __name__ == "__main__":
    main()
