"""Recorded runs of vLLM against what kernels that were measured one by one tell, request by request.

    python studies/serving/study.py recorded --shared ../shared
    python studies/serving/study.py recorded --run DIR --profile DIR [--exchange FILE] [--model config.json]

Writes recorded.csv, measured and told times with each part left out in turn, and requests.csv, those of every request.
A run has `vllm/meta.json`, `vllm/requests.jsonl` and `config.json`; a profile has LLMServingSim's layout. About a
minute on two cores, nearly all of it compiling the simulator and the shipped kernels. See README.md.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from runs import Run, Waited, read_run, waited
from step_times import tables_of

from jaxmoe.errors import InputError
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.serving.online.profile import read_profile
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1].parent / "shared"
METRICS = {"ttft": "first_token", "tpot": "per_token", "latency": "latency"}
PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
Row = dict[str, object]


def told(run: Run, table: StepTable) -> Waited:
    """Waiting times of the run by a table, counted as they were measured."""
    served = serve(run.requests, run.fleet, table)
    return waited(served.queued, served.first_token, served.finish, run.requests.output)


def statistics(seconds: np.ndarray) -> dict[str, float]:
    """The mean, and percentiles."""
    return {"mean": float(seconds.mean())} | {
        name: float(np.percentile(seconds, part)) for name, part in PERCENTILES.items()
    }


def compared(run: Run, name: str, found: Waited) -> Iterable[Row]:
    """Rows of every metric and statistic."""
    for metric, field in METRICS.items():
        measured, own = (statistics(getattr(each, field)) for each in (run.waited, found))
        for statistic, seconds in measured.items():
            yield {
                "run": run.name,
                "times": name,
                "metric": metric,
                "statistic": statistic,
                "measured_s": seconds,
                "told_s": own[statistic],
                "error": own[statistic] / seconds - 1,
                "llmservingsim_error": run.theirs.get((metric, statistic), ""),
            }


def by_request(run: Run, found: Waited) -> Iterable[Row]:
    """Rows of every request."""
    for row in range(len(run.requests)):
        times: Mapping[str, float] = {
            f"{metric}_{what}_s": float(getattr(waits, field)[row])
            for metric, field in METRICS.items()
            for what, waits in (("measured", run.waited), ("told", found))
        }
        prompt, output = int(run.requests.prompt[row]), int(run.requests.output[row])
        yield {"run": run.name, "request": row, "prompt": prompt, "output": output, **times}


def recorded(pairs: Iterable[tuple[Path, Path]], options: argparse.Namespace, out: Path) -> None:
    """Write recorded.csv and requests.csv of runs and their profiles."""
    rows: list[Row] = []
    requests: list[Row] = []
    for folder, kernels in pairs:
        run = read_run(folder, options.model)
        profile = read_profile(kernels, run.deployment.tensor)
        for name, table in tables_of(run, profile, *_exchanges(options, run.version)):
            found = told(run, table)
            if name == "profile":
                requests += by_request(run, found)
            rows += (own := list(compared(run, name, found)))
            _show(run, name, own)
    write_table(out / "recorded.csv", rows, digits=4)
    write_table(out / "requests.csv", requests, digits=5)
    print(f"tables are in {out}")


def _exchanges(options: argparse.Namespace, version: str) -> tuple[Path, Path | None]:
    """Measured exchanges on the GPUs of the recorded runs: of this version of vLLM, and of NCCL on another node."""
    if options.exchange:
        return options.exchange, None
    folder = options.shared / "measured" / "gpu" / "rtx_pro_6000_server" / "comm"
    return folder / f"vllm_{version}" / "custom_allreduce_perf.parquet", folder / "nccl_2.29.2" / "nccl_perf.parquet"


def _show(run: Run, name: str, rows: Iterable[Row]) -> None:
    errors: dict[object, list[str]] = {}
    for row in rows:
        errors.setdefault(row["metric"], []).append(f"{row['statistic']} {100 * float(str(row['error'])):+.1f}")
    print(f"{run.name}, {name}, errors in %: " + "; ".join(f"{key} {', '.join(each)}" for key, each in errors.items()))


def _pairs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    if options.run:
        return [(options.run, options.profile)]
    serving = options.shared / "measured" / "serving"
    runs = sorted(each.parents[1] for each in serving.glob("*/vllm/meta.json"))
    if not runs:
        raise InputError(f"{serving}: has no recorded run; give one with --run and --profile, or --shared FOLDER")
    return [(run, run.with_name(f"profile_{run.name}")) for run in runs]


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("what", choices=("recorded",))
    parser.add_argument("--shared", type=Path, default=SHARED, metavar="FOLDER", help="has measured/")
    parser.add_argument("--run", type=Path, metavar="DIR", help="one run, in place of those of --shared")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="its kernels")
    parser.add_argument(
        "--exchange", type=Path, metavar="FILE", help="vLLM's all-reduce, measured; of --shared unless said"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="config.json of a model that is not known by its name"
    )
    options = parser.parse_args()
    if (options.run is None) != (options.profile is None):
        parser.error("--run and --profile go together; give both")
    try:
        recorded(_pairs(options), options, folder_of_tables(HERE, options))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
