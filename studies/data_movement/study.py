"""What recorded traces show of the data-movement study's observations and insights; see README.md.

    python studies/data_movement/study.py

Writes `statistics.csv` (every trace), `loads.csv` (load counts), `insights.csv` and, for the figures,
`arrays.npz` beside this file. `prediction.py`, `synthesis.py` and `presets.py` are its other parts.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from insights import (
    layers_and_tokens,
    pair_separation,
    placements,
    prefill_tells_decode,
    with_phases,
    workloads,
)

from jaxmoe.experiment.table import add_shared, folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.traces import GatingTrace, load_counts, read_loads, read_trace
from jaxmoe.traces.statistics import (
    BATCH_TOKENS,
    PairCounts,
    Summary,
    coactivation,
    conditional,
    count_pairs,
    count_shuffled,
    coverage_curve,
    every_pair,
    expert_runs,
    long_tail,
    node_load_ratio,
    pairs_above,
    phase_agreement,
    shuffled_phases,
    summarise,
    summarise_loads,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHOWN = ("deepseek-v2-lite/summary", "gpt-oss-20b/gpqa_main", "mixtral-8x7b/reasoning")
SEED = 0
CURVE_POINTS = 201
WINDOW_TOKENS = 256

Row = dict[str, object]


def main() -> None:
    """Measure everything and write the tables."""
    parser = script_options(__doc__, writes=True)
    add_shared(parser, ROOT.parent / "shared", "traces")
    given = parser.parse_args()
    folder, to = given.shared / "traces", folder_of_tables(HERE, given)
    files = gating_files(folder)
    traces = {label(file): read_trace(file) for file in files if not file.name.startswith("load_")}
    statistics, insights, arrays = [], [], {}
    for name, trace in traces.items():
        print(name, flush=True)
        counts, shuffled = count_pairs(trace), count_shuffled(trace, SEED)
        summary = summarise(trace.layer_ids, trace.top_k, counts, shuffled, SEED)
        statistics.append({"trace": name, "tokens": trace.num_tokens} | digits(summary))
        if name in SHOWN:
            insights += trace_insights(name, trace, counts, summary)
            arrays |= {f"{name}/{key}": array for key, array in pictured(trace, counts, shuffled, summary).items()}
    for model in dict.fromkeys(name.split("/")[0] for name in traces):
        of_model = {name: trace for name, trace in traces.items() if name.startswith(model)}
        insights += workloads(model, of_model, nodes_for(next(iter(of_model.values()))))
        arrays |= {f"{name}/load": load_counts(trace).counts[0] for name, trace in of_model.items()}
    loads = [read_loads(file) for file in files if file.name.startswith("load_")]
    names = [label(file) for file in files if file.name.startswith("load_")]
    write_table(to / "statistics.csv", statistics)
    summaries = [{"counts": n} | digits(summarise_loads(one, SEED)) for n, one in zip(names, loads, strict=True)]
    write_table(to / "loads.csv", summaries)
    write_table(to / "insights.csv", sorted(insights, key=lambda line: int(line["insight"])))
    write_arrays(to, arrays)
    print((to / "statistics.csv").read_text(), (to / "insights.csv").read_text(), sep="\n")


def trace_insights(name: str, trace: GatingTrace, counts: PairCounts, summary: Summary) -> Iterable[Row]:
    """What one trace says of the insights that need no second topic."""
    nodes = nodes_for(trace)
    yield from prefill_tells_decode(name, trace, SEED)
    yield from layers_and_tokens(name, summary)
    yield from placements(name, trace, nodes, SEED)
    yield from pair_separation(name, trace, counts, nodes, SEED)


def nodes_for(trace: GatingTrace) -> int:
    """Nodes to place experts on: few enough for each to have several."""
    return 8 if trace.num_experts >= 32 else 4


def pictured(trace: GatingTrace, counts: PairCounts, shuffled: PairCounts, summary: Summary) -> dict[str, np.ndarray]:
    """What the figures of one trace show."""
    layers = len(trace.layer_ids)
    some = [0, layers // 2, layers - 1]
    _, phased, phase = with_phases(trace)
    agreement, by_chance = (phase_agreement(phased, one) for one in (phase, shuffled_phases(phase, SEED)))
    share = expert_runs(layers, trace.num_experts, nodes_for(trace))
    return {
        "layer_ids": trace.layer_ids,
        "token_heatmaps": conditional(counts.token_pairs)[some].astype(np.float16),
        "layer_heatmaps": conditional(counts.layer_pairs)[[0, layers // 2, layers - 2]].astype(np.float16),
        "together": coactivation(counts.together)[some].astype(np.float32),
        "token_curve": curve(every_pair(counts.token_pairs)),
        "token_curve_shuffled": curve(every_pair(shuffled.token_pairs)),
        "layer_curve": curve(every_pair(counts.layer_pairs)),
        "layer_curve_shuffled": curve(every_pair(shuffled.layer_pairs)),
        "together_curve": curve(pairs_above(counts.together)),
        "together_curve_independent": curve(independent_pairs(counts.load)),
        "reuse": summary.figures["token_reuse"],
        "reuse_shuffled": summary.figures["token_reuse_baseline"],
        "spearman_token": agreement.token_heatmap,
        "spearman_layer": agreement.layer_heatmap,
        "spearman_token_shuffled": by_chance.token_heatmap,
        "spearman_layer_shuffled": by_chance.layer_heatmap,
        "node_ratio": node_load_ratio(trace, share, WINDOW_TOKENS)[:, layers // 2].astype(np.float32),
        "long_tail": long_tail(trace, BATCH_TOKENS, seed=SEED)[:, :, layers // 2],
    }


def independent_pairs(load: np.ndarray) -> np.ndarray:
    """Pairs i < j as often as experts of these loads, [layer, expert], would meet if each were chosen by itself."""
    return pairs_above(load[:, :, None].astype(float) * load[:, None, :])


def curve(events: np.ndarray) -> np.ndarray:
    """The share of all events on the most frequent pairs, at even parts of the pairs, mean over layers."""
    whole = coverage_curve(events).mean(axis=0)
    return np.interp(np.linspace(0, 1, CURVE_POINTS), np.linspace(0, 1, len(whole) + 1), np.append(0, whole))


def digits(summary: Summary) -> Row:
    """The means over layers as text; empty where there is none."""
    return {name: "" if value is None else f"{value:.4f}" for name, value in summary.mean().items()}


def gating_files(folder: Path) -> list[Path]:
    """Recorded traces and load counts, by model; what is in `arrivals` are times of requests, without gating."""
    return sorted(file for file in folder.glob("*/*.npz") if file.parent.name != "arrivals")


def label(file: Path) -> str:
    """A trace's name: its folder and file."""
    return f"{file.parent.name}/{file.stem}"


def write_arrays(to: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write what the figures show, aside first."""
    aside = to / "arrays.npz.part"
    with aside.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    aside.replace(to / "arrays.npz")


if __name__ == "__main__":
    main()
