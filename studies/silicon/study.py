"""Time to first token and per token of measured systems against what kernels, and three constants a backend, tell.

    python studies/silicon/study.py tables --data ../shared/measured/silicon/silicon_sample.csv
    python studies/silicon/study.py fit --data ../shared/measured/silicon/silicon_sample.csv
    python studies/silicon/study.py predict --data FILE.csv --rows OUT.csv
    python studies/silicon/study.py others --data ../shared/measured/silicon/silicon_sample.csv
    python studies/silicon/study.py h800

`tables` writes pairs.csv, summary.csv and worst.csv: constants are fitted without the pairs of model and system that
are judged, in five folds. `fit` prints the constants that jaxmoe ships, fitted to all rows. `predict` writes times of
all rows of a file of the same columns with these, and tells their errors where it has measured ones. `others` writes
others.csv: dense models, and prompts that are read on GPUs of their own, by the shipped constants, which know none of
them, also by how decoding is laid over GPUs. `h800` writes h800.csv, h800_ratios.csv and h800_waterfall.csv: published
runs of DeepSeek-V3 on many H800 and H100. Each takes about a minute on two cores, nearly all of it compiling. See
README.md.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import h800
import numpy as np
from apart import has_workers, told_apart, workers_of
from fitting import fit_overheads
from peer import told_by_peer
from rows import DENSE, MODELS, Measured, read_rows
from times import RowTimes, row_times

from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.serving.closed_loop import OVERHEADS, Loop, Overheads, wait

HERE = Path(__file__).resolve().parent
FOLDS, SEED = 5, 0
LARGE = 15  # rows of a pair whose own error is asked for


def told_by(times: Sequence[RowTimes], overheads: dict[str, Overheads]) -> np.ndarray:
    """Seconds to the first token and per token of every row, [row, 2]."""
    found = np.empty((len(times), 2))
    for backend in {each.row.columns["backend"] for each in times}:
        at = [index for index, each in enumerate(times) if each.row.columns["backend"] == backend]
        served = wait(loops([times[index] for index in at]), overheads[backend])
        found[at] = np.stack([served.first_token, served.per_token], axis=-1)
    return found


def loops(times: Sequence[RowTimes]) -> Loop:
    """The loops of rows as one, [row]."""
    return Loop(*(np.array(column) for column in zip(*(each.loop for each in times), strict=True)))


def left_out(times: Sequence[RowTimes]) -> np.ndarray:
    """Seconds as `told_by`, each pair with constants fitted without the pairs of its fold."""
    pairs = sorted({each.row.left_out_with for each in times})
    fold = dict(zip(pairs, np.random.default_rng(SEED).permutation(len(pairs)) % FOLDS, strict=True))
    found = np.empty((len(times), 2))
    for each in range(FOLDS):
        judged = [index for index, one in enumerate(times) if fold[one.row.left_out_with] == each]
        overheads = fit_overheads([one for one in times if fold[one.row.left_out_with] != each])
        found[judged] = told_by([times[index] for index in judged], overheads)
    return found


def errors(rows: Sequence[Measured], told: np.ndarray) -> np.ndarray:
    """Told over measured less 1, [row, 2]; -1, which is 100 %, for a row that is not covered."""
    off = told / np.array([(row.first_token, row.per_token) for row in rows]) - 1
    return np.where(np.isnan(told), -1.0, off)


def summary(name: str, times: Sequence[RowTimes], told: np.ndarray) -> dict[str, object]:
    """Medians of absolute errors over rows, and of the medians of pairs."""
    rows = [each.row for each in times]
    error = errors(rows, told)
    pairs = grouped(rows, error, lambda row: row.pair)
    of_pair = np.array([np.nanmedian(np.abs(each), axis=0) for each in pairs.values()])
    large = [np.nanmedian(np.abs(each[:, 1])) for each in pairs.values() if len(each) >= LARGE]
    every, middle = np.nanmedian(np.abs(error), axis=0), np.nanmedian(of_pair, axis=0)
    return {
        "times": name,
        "rows": len(times),
        "pairs": len(of_pair),
        "first_token_error": every[0],
        "per_token_error": every[1],
        "first_token_error_of_pairs": middle[0],
        "per_token_error_of_pairs": middle[1],
        "worst_per_token_error_of_large_pairs": max(large, default=np.nan),
    }


def grouped(
    rows: Sequence[Measured], error: np.ndarray, key: Callable[[Measured], tuple[str, ...]]
) -> dict[tuple[str, ...], np.ndarray]:
    """Errors of rows by their key, sorted."""
    found = defaultdict(list)
    for row, one in zip(rows, error, strict=True):
        found[key(row)].append(one)
    return {name: np.array(found[name]) for name in sorted(found)}


def with_backend(row: Measured) -> tuple[str, ...]:
    """Model, system and backend."""
    return (*row.pair, row.columns["backend"])


def layout_of_decoding(row: Measured) -> tuple[str, ...]:
    """How attention is laid over the GPUs of a worker that decodes, with system and backend."""
    layout = workers_of(row, "decode").deployment
    return f"tensor {layout.tensor:02}, data {layout.data:02}, {layout.experts}", row.pair[1], row.columns["backend"]


def tables(times: Sequence[RowTimes], roofline: Sequence[RowTimes], out: Path) -> None:
    """Write pairs.csv, summary.csv and worst.csv."""
    none = {backend: Overheads() for backend in OVERHEADS}
    judged, bare, sheet = left_out(times), told_by(times, none), told_by(roofline, none)
    found = [
        summary("kernels and constants, pairs left out", times, judged),
        summary("kernels alone", times, bare),
        summary("data sheet alone", roofline, sheet),
    ]
    measured = [each.row for each in times]
    peer = told_by_peer(measured)
    found += beside_peer(times, judged, bare, peer)
    write_table(out / "summary.csv", found, digits=3)
    alone = grouped(measured, errors(measured, bare), with_backend)
    covered = np.where(np.isnan(peer), np.nan, errors(measured, peer))
    of_peer = grouped(measured, covered, with_backend)
    rows = [
        dict(zip(("model", "system", "backend"), name, strict=True))
        | {"rows": len(error), **_of_pair("", error), **_of_pair("kernels_alone_", alone[name])}
        | _of_pair("aiconfigurator_", of_peer[name])
        for name, error in grouped(measured, errors(measured, judged), with_backend).items()
    ]
    write_table(out / "pairs.csv", rows, digits=3)
    write_table(out / "worst.csv", worst(measured, judged), digits=3)
    for row in found:
        print(
            ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else str(value) for name, value in row.items())
        )


def beside_peer(
    times: Sequence[RowTimes], judged: np.ndarray, bare: np.ndarray, peer: np.ndarray
) -> list[dict[str, object]]:
    """Errors of AIConfigurator on the rows that it covers, and ours on the same."""
    covered = np.flatnonzero(~np.isnan(peer).any(axis=1))
    if not len(covered):
        return []
    some = [times[at] for at in covered]
    return [
        summary("AIConfigurator, rows that it covers", some, peer[covered]),
        summary("kernels and constants, pairs left out, on these rows", some, judged[covered]),
        summary("kernels alone, on these rows", some, bare[covered]),
    ]


WORST = 10
TOLD = ("model_path", "system", "backend", "backend_version", "gemm_quant_mode", "moe_quant_mode", "isl", "osl")
LAYOUT = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def worst(rows: Sequence[Measured], told: np.ndarray) -> list[dict[str, object]]:
    """The rows that are told worst per token, of each configuration's factor, the worst first."""
    factor = np.abs(np.log1p(errors(rows, told)[:, 1]))
    return [
        {name: rows[at].columns[name] for name in (*TOLD, *LAYOUT)}
        | {"concurrency": rows[at].concurrency, "measured_ms": rows[at].per_token * 1e3, "told_ms": told[at, 1] * 1e3}
        for at in np.argsort(-np.nan_to_num(factor))[:WORST]
    ]


def _of_pair(prefix: str, error: np.ndarray) -> dict[str, float | None]:
    names = ("first_token", "per_token")
    sizes = {f"{prefix}{name}_error": _median(np.abs(error[:, at])) for at, name in enumerate(names)}
    return sizes | {f"{prefix}{name}_bias": _median(error[:, at]) for at, name in enumerate(names)}


def _median(errors: np.ndarray) -> float | None:
    """The median of the rows that are covered; none where no row is."""
    return None if np.isnan(errors).all() else float(np.nanmedian(errors))


def others(data: Path, out: Path) -> None:
    """Write others.csv: errors of dense models, and of prompts read apart, by model, system and backend."""
    found: list[dict[str, object]] = []
    dense = row_times(read_rows(data, models=DENSE))
    apart = [row for row in read_rows(data, "disagg", {*MODELS, *DENSE}) if has_workers(row)]
    none = {backend: Overheads() for backend in OVERHEADS}
    of_dense = [told_by(dense, each) for each in (OVERHEADS, none)]
    of_apart = [told_apart(apart, each) for each in (OVERHEADS, none)]
    tables_ = {
        "dense": ([each.row for each in dense], of_dense, with_backend),
        "prompts read apart": (apart, of_apart, with_backend),
        "prompts read apart, by GPUs that decode": (apart, of_apart, layout_of_decoding),
    }
    for kind, (rows, told, key) in tables_.items():
        every = ["all"] * (key is with_backend)
        whole, alone = (
            {(name, "", ""): errors(rows, each) for name in every} | grouped(rows, errors(rows, each), key)
            for each in told
        )
        found += [
            {"kind": kind, **dict(zip(("model", "system", "backend"), name, strict=True)), "rows": len(error)}
            | _of_pair("", error)
            | _of_pair("kernels_alone_", alone[name])
            for name, error in whole.items()
        ]
    write_table(out / "others.csv", found, digits=3)
    for row in found:
        print(", ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))


def published_runs(out: Path) -> None:
    """Write h800.csv, h800_ratios.csv and h800_waterfall.csv, and print them."""
    rows = list(h800.runs())
    for name, table in (("", rows), ("_ratios", list(h800.ratios(rows))), ("_waterfall", list(h800.waterfall()))):
        write_table(out / f"h800{name}.csv", table, digits=6)
        for row in table:
            said = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            print(", ".join(f"{key} {value}" for key, value in said.items() if value is not None))


def predict(times: Sequence[RowTimes], file: Path) -> None:
    """Write told times beside the columns of each configuration, with the shipped constants."""
    told = told_by(times, OVERHEADS)
    write_table(
        file,
        [
            {**_configuration(each.row), "ttft_ms": first * 1e3, "tpot_ms": per * 1e3}
            for each, (first, per) in zip(times, told, strict=True)
        ],
        digits=5,
    )
    row = summary("shipped constants", times, told)
    print(", ".join(f"{name} {value:.3g}" if isinstance(value, float) else str(value) for name, value in row.items()))


def _configuration(row: Measured) -> dict[str, object]:
    measured = ("silicon_ttft_ms", "silicon_tpot_ms")
    return {name: value for name, value in row.columns.items() if name not in measured}


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("what", choices=("tables", "fit", "predict", "others", "h800"))
    parser.add_argument("--data", type=Path, help="a file of the columns of silicon_sample.csv; h800 needs none")
    parser.add_argument("--rows", type=Path, metavar="OUT.csv", help="with predict: the file to write")
    options = parser.parse_args()
    _run(options, parser)


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.what == "h800":
        published_runs(folder_of_tables(HERE, options))
        return
    if options.data is None:
        parser.error(f"{options.what} needs --data FILE.csv")
    if options.what == "predict" and options.rows is None:
        parser.error("predict needs --rows OUT.csv")
    if options.what == "others":
        others(options.data, folder_of_tables(HERE, options))
        return
    rows = read_rows(options.data)
    times = row_times(rows)
    if options.what == "predict":
        predict(times, options.rows)
    elif options.what == "fit":
        for backend, constants in fit_overheads(times).items():
            print(backend, ", ".join(f"{name}={value:.3g}" for name, value in constants._asdict().items()))
    else:
        tables(times, row_times(rows, roofline=True), folder_of_tables(HERE, options))


if __name__ == "__main__":
    main()
