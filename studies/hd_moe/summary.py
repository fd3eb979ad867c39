"""What the tables say together: fits, ratios, whole-model times beside the published ones, and the claims as text.

python studies/hd_moe/summary.py --shared FOLDER  # works out the derived tables anew, prints the claims
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import published
from cases import CASES, DEEPSEEK, HERE, MIXTRAL, QWEN, ROOT

from jaxmoe.experiment import code_pieces
from jaxmoe.experiment.table import earlier_table, folder_of_tables, script_options
from jaxmoe.experiment.table_age import Code, code_of, record
from jaxmoe.files import read_table, write_table
from jaxmoe.tune.node_balance import fit_gamma

MOE_LAYERS = {MIXTRAL: 32, DEEPSEEK: 26, QWEN: 28}
PAPER_RANGES = {"tp": (1.1, 1.8), "ep": (1.1, 1.5), "hybrid": (1.0, 1.4)}
COUNTINGS = ("published", "one_byte", "mean_frequencies", "equations")
# Fig. 10, 11 and 13, of whose bodies the text alone is at hand: what is compared, which part of the layer's time, and
# what the text says of it.
PAPER_STAGES = (
    ("10", "total", "tp", "node", "1.0 to 3.0"),
    ("10", "total", "ep", "node", "1.0 to 3.0"),
    ("10", "total", "hybrid_ring", "node", "1.5"),
    ("11", "compute", "ep", "node_link", "2.0 on average"),
    ("13", "network", "tp", "node_link", "above 1"),
    ("13", "network", "hybrid_ring", "node_link", "above 1"),
    ("13", "network", "node", "node_link", "1.2 on average"),
)
PAPER_DYNAMIC = {"2": 1.15, "5": 1.25}
KEY = ("model", "mesh", "TFLOPs_per_s", "GB_per_s")
Tables = dict[str, list[dict]]


def derived(tables: Tables, shared: Path) -> Tables:
    """Tables worked out from those of the jobs and from the published figures."""
    rows = published.read(shared)
    fits = {model: published.fit_attention(rows, model) for model in (MIXTRAL, DEEPSEEK, QWEN)}
    whole = whole_model(tables["times"], fits)
    return {
        "gamma": gammas(tables["estimates"]),
        "gamma_by_batch": gammas_by_batch(tables["estimates"]),
        "gamma_milp": milp_gammas(tables["two_stages"]),
        "stages": stages(tables["times"], rows),
        "window": windows(tables["dynamic"]),
        "tuners": tuner_ratios([*tables["two_stages"], *tables["gradient"]]),
        "attention": [
            {"model": model, "weights_node_s": f"{fit.weights:.6e}", "context_node_s": f"{fit.context:.6e}"}
            | {"arithmetic_node_s_TFLOPs": f"{fit.arithmetic:.6e}", "rows": fit.rows, "worst_error": f"{fit.worst:.2e}"}
            for model, fit in fits.items()
        ],
        "whole_model": whole,
        "published": beside_published(whole, rows),
        "gaps": gaps(tables["optimum"]),
    }


def group(rows: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some columns, in the order in which these first occur."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(str(row[key]) for key in keys)].append(row)
    return dict(groups)


def column(rows: Iterable[dict], key: str) -> np.ndarray:
    """A column as numbers."""
    return np.array([float(row[key]) for row in rows])


def gammas(rows: list[dict]) -> list[dict]:
    """Fits of Eq. 3 by kind of plan and over all kinds, with the R2 of node estimate and link model."""
    made = []
    for (model,), of_model in group(rows, "model").items():
        kinds = group(of_model, "kind") | {("all",): of_model}
        for (kind,), points in kinds.items():
            simulated, link = column(points, "simulated_s"), column(points, "link_model_s")
            fit = fit_gamma(column(points, "node_estimate_s"), simulated)
            r2 = 1 - np.sum((simulated - link) ** 2) / np.sum((simulated - simulated.mean()) ** 2)
            made.append(
                {"model": model, "kind": kind, "points": len(points), "gamma": f"{fit.gamma:.4f}"}
                | {"node_r2": f"{fit.r2:.4f}", "link_r2": f"{r2:.6f}"}
            )
    return made


def gammas_by_batch(rows: list[dict]) -> list[dict]:
    """R2 of gamma x estimate within each batch size, whose points differ by the plan alone.

    With the gamma fitted there, and with that of all batch sizes: pooled, points of small and of large batches lie far
    apart, and any line through the origin explains most of that.
    """
    made = []
    for (model, kind), of_kind in group(rows, "model", "kind").items():
        pooled = fit_gamma(column(of_kind, "node_estimate_s"), column(of_kind, "simulated_s"))
        for (tokens,), points in group(of_kind, "batch_tokens").items():
            estimate, simulated = column(points, "node_estimate_s"), column(points, "simulated_s")
            own, around = fit_gamma(estimate, simulated), np.sum((simulated - simulated.mean()) ** 2)
            link = column(points, "link_model_s")
            made.append(
                {"model": model, "kind": kind, "batch_tokens": tokens, "points": len(points)}
                | {"gamma": f"{own.gamma:.4f}", "r2": f"{own.r2:.4f}"}
                | {"r2_of_pooled": f"{1 - np.sum((simulated - pooled.gamma * estimate) ** 2) / around:.4f}"}
                | {"link_r2": f"{1 - np.sum((simulated - link) ** 2) / around:.6f}"}
            )
    return made


def milp_gammas(rows: list[dict]) -> list[dict]:
    """The fit that node balance was given in every case: full nodes, the batch size of the case."""
    return [
        dict(zip(KEY, key, strict=True)) | {"gamma": of_case[0]["gamma"], "r2": of_case[0]["gamma_r2"]}
        for key, of_case in group(rows, *KEY).items()
    ]


def stages(times: list[dict], rows: list[published.Row]) -> list[dict]:
    """Fig. 10, 11 and 13 on DeepSeek: a strategy's time over another's, all machines and batch sizes."""
    ours = [row for row in times if row["model"] == DEEPSEEK]
    named = {"tp": "tp", "ep": "ep", "hybrid_ring": "hybrid", "node_link": "node_link"}
    made = []
    for figure, what, above, below, paper in PAPER_STAGES:
        row = {"figure": figure, "part": what, "time_of": above, "over": below, "paper": paper}
        theirs = _published_ratios(rows, what, named.get(above), named.get(below))
        row |= {"published_times": _spread(theirs) if len(theirs) else ""}
        for counting in COUNTINGS:
            by = {name: of for (name,), of in group((r for r in ours if r["counting"] == counting), "strategy").items()}
            row[counting] = (
                _spread(_part(by[above], what) / _part(by[below], what)) if {above, below} <= set(by) else ""
            )
        made.append(row)
    return made


def _part(rows: list[dict], what: str) -> np.ndarray:
    if what == "network":
        return column(rows, "dispatch_s") + column(rows, "combine_s")
    return column(rows, f"{what}_s")


def _published_ratios(rows: list[published.Row], what: str, above: str | None, below: str | None) -> np.ndarray:
    """The same of the published whole-model times, where these have both strategies and the part."""
    part = {"compute": "computation", "network": "communication"}.get(what)
    if part is None or above is None or below is None:
        return np.array([])
    seen = {(r.mesh, r.tflops, r.gbps, r.batch, r.strategy): getattr(r, part) for r in rows if r.model == DEEPSEEK}
    return np.array([seconds / seen[(*key[:-1], below)] for key, seconds in seen.items() if key[-1] == above])


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.2f} ({values.min():.2f}-{values.max():.2f})"


def windows(rows: list[dict]) -> list[dict]:
    """Fig. 15: how many experts fit the window of Eq. 17, by plan and topic, and in how many as many as broadcast."""
    made = []
    for (experts, model), chosen in group(rows, "experts", "model").items():
        fits = column((one for (one, *_) in group(chosen, "plan", "topic").values()), "experts_in_window")
        row = {"experts": experts, "model": model, "combinations": len(fits), "mean_fit": f"{fits.mean():.2f}"}
        row |= {"least_fit": f"{fits.min():.2f}", "most_fit": f"{fits.max():.2f}"}
        made.append(row | {"all_fit_in": int((fits >= float(experts)).sum())})
    return made


def tuner_ratios(rows: list[dict]) -> list[dict]:
    """By case: two-stage over gradient, seed by seed, of plans that gather; and their wall times."""
    made = []
    for key, of_case in group(rows, *KEY).items():
        by = {name: chosen for (name,), chosen in group(of_case, "optimiser").items()}
        two, ours = by["milp-bayes"], by["gradient"]
        ratio = column(two, "gathered_s") / column(ours, "gathered_s")
        returned = column(two, "returned_s") / column(ours, "returned_s")
        walls = column(two, "wall_s"), column(ours, "wall_s")
        row = dict(zip(KEY, key, strict=True)) | {"layers": two[0]["layers"], "seeds": len(ratio)}
        row |= {"milp_bayes_s": f"{column(two, 'gathered_s').mean():.6e}"}
        row |= {"gradient_s": f"{column(ours, 'gathered_s').mean():.6e}", "bound_s": two[0]["bound_s"]}
        row |= {"ratio_mean": f"{ratio.mean():.3f}", "ratio_least": f"{ratio.min():.3f}"}
        row |= {"ratio_returned": f"{returned.mean():.3f}"}
        row |= {"milp_bayes_wall_s": f"{walls[0].mean():.1f}", "gradient_wall_s": f"{walls[1].mean():.1f}"}
        row |= {"gradient_first_wall_s": f"{walls[1][0]:.1f}", "gradient_later_wall_s": f"{walls[1][1:].mean():.1f}"}
        row |= {"wall_ratio": f"{walls[1].mean() / walls[0].mean():.3f}"}
        row |= {"node_status": two[0]["node_status"], "node_gap": two[0]["node_gap"], "gamma": two[0]["gamma"]}
        for name in ("node", "published"):
            over = column(by[name], "gathered_s")[0] / column(two, "gathered_s").mean() if name in by else None
            row |= {f"{name}_over_milp_bayes": "" if over is None else f"{over:.3f}"}
        made.append(row)
    return made


def whole_model(rows: list[dict], fits: dict[str, published.AttentionFit]) -> list[dict]:
    """TBT: the timed layer times the number of MoE layers, and attention as the published times have it."""
    made = []
    for key, of_setting in group(rows, *KEY, "counting", "batch_tokens").items():
        model, mesh, tflops, _, _, tokens = key
        x, y = mesh.split("x")
        attention = max(fits[model](int(x) * int(y), float(tflops), int(tokens)), 0.0)
        tbt = {row["strategy"]: MOE_LAYERS[model] * float(row["total_s"]) + attention for row in of_setting}
        for name, seconds in tbt.items():
            row = dict(zip((*KEY, "counting", "batch_tokens"), key, strict=True)) | {"strategy": name}
            row |= {"attention_s": f"{attention:.6e}", "tbt_s": f"{seconds:.6e}"}
            made.append(row | {"speedup_over_tp": f"{tbt['tp'] / seconds:.4f}"})
    return made


def beside_published(whole: list[dict], rows: list[published.Row]) -> list[dict]:
    """Our whole-model speed-up of node-link balance over each baseline, in all countings, beside the published one."""
    ours = {
        (*(str(row[key]) for key in KEY), row["counting"], str(row["batch_tokens"]), row["strategy"]): float(
            row["tbt_s"]
        )
        for row in whole
    }
    theirs = {(r.model, r.mesh, r.tflops, r.gbps, r.batch, r.strategy): r.total for r in rows}
    made = []
    for case in CASES:
        for batch in sorted({row.batch for row in rows}):
            key = (case.model, case.mesh, float(case.tflops), float(case.gbps), batch)
            if (*key, "tp") not in theirs or (*(case.columns.values()), "equations", str(batch), "tp") not in ours:
                continue
            for name in PAPER_RANGES:
                row = case.columns | {"batch_tokens": batch, "over": name}
                row |= {"published": f"{theirs[(*key, name)] / theirs[(*key, 'node_link')]:.3f}"}
                for counting in COUNTINGS:
                    at = (*case.columns.values(), counting, str(batch))
                    # The published hybrid reduces by rings and leaves out what the regions send each other.
                    base = "hybrid_ring" if name == "hybrid" else name
                    row |= {f"ours_{counting}": f"{ours[(*at, base)] / ours[(*at, 'node_link')]:.3f}"}
                    row |= {f"gradient_{counting}": f"{ours[(*at, base)] / ours[(*at, 'gradient')]:.3f}"}
                made.append(row)
    return made


def gaps(rows: list[dict]) -> list[dict]:
    """How far above the optimum each optimiser is, over layers and seeds."""
    made = []
    for (mesh, name), chosen in group(rows, "mesh", "optimiser").items():
        gap = column(chosen, "gap")
        proven = {row["layer"]: str(row["proven"]) == "True" for row in chosen}
        made.append(
            {"mesh": mesh, "optimiser": name, "plans": len(gap), "median_gap": f"{np.median(gap):.5f}"}
            | {"mean_gap": f"{gap.mean():.5f}", "worst_gap": f"{gap.max():.5f}", "proven": sum(proven.values())}
            | {"layers": len(proven)}
        )
    return made


def text(tables: Tables) -> str:
    """The claims with what was measured, a line each."""
    return "\n".join(
        [
            *_claim_lines(tables),
            *_range_lines(tables),
            *_estimate_lines(tables),
            *_stage_lines(tables),
            *_tuner_lines(tables),
            *_gap_lines(tables),
            *_dynamic_lines(tables),
            *_equal_time_lines(tables),
            f"all jobs, one after the other: {column(tables['jobs'], 'wall_s').sum():.0f} s",
        ]
    )


def _claim_lines(tables: Tables) -> list[str]:
    """The claim over TP, on the models whose traces are real."""
    rows = [row for row in tables["published"] if row["over"] == "tp" and row["model"] != QWEN]
    parts = [f"{counting} {column(rows, f'ours_{counting}').mean():.2f}" for counting in COUNTINGS]
    return [f"HD-MoE over TP, whole model, mean by counting: {', '.join(parts)}"]


def _stage_lines(tables: Tables) -> list[str]:
    lines = [
        f"Fig. {row['figure']}, {row['part']} of {row['time_of']} over {row['over']}: paper {row['paper']}, "
        f"its published times {row['published_times'] or '-'}; "
        + ", ".join(f"{counting} {row[counting]}" for counting in COUNTINGS)
        for row in tables["stages"]
    ]
    r2 = {name: column(tables["gamma_by_batch"], name) for name in ("r2", "r2_of_pooled")}
    below = {name: f"{(values < 0).sum()} of {len(values)}" for name, values in r2.items()}
    milp = column(tables["gamma_milp"], "r2")
    return [
        *lines,
        f"R2 of the node estimate within one kind of plan and batch size: median {np.median(r2['r2']):.2f}, below 0 in "
        f"{below['r2']}; with the gamma of all sizes median {np.median(r2['r2_of_pooled']):.2f}, below 0 in "
        f"{below['r2_of_pooled']}",
        f"the fits that node balance was given: R2 {milp.min():.2f} to {milp.max():.2f}, "
        f"below 0 in {(milp < 0).sum()} of {len(milp)}",
    ]


def _equal_time_lines(tables: Tables) -> list[str]:
    return [
        f"{' '.join(row[key] for key in KEY)}, {row['budget_s']} s: {row['optimiser']} "
        f"{1e6 * float(row['gathered_s']):.1f} µs after {row['runs']} runs in {row['wall_s']} s"
        for row in tables.get("equal_time", [])
    ]


def _range_lines(tables: Tables) -> list[str]:
    lines = []
    for (name,), rows in group(tables["published"], "over").items():
        low, high = PAPER_RANGES[name]
        parts = [f"node-link balance over {name} (paper {low}-{high}):"]
        for key in ("published", *(f"{plan}_{counting}" for plan in ("ours", "gradient") for counting in COUNTINGS)):
            values = column(rows, key)
            parts.append(f"{key} {values.min():.2f}-{values.max():.2f}, mean {values.mean():.2f};")
        lines.append(" ".join(parts))
    return lines


def _estimate_lines(tables: Tables) -> list[str]:
    return [
        f"{row['model']}, {row['kind']}: gamma {row['gamma']}, R2 of the node estimate {row['node_r2']}, of the link "
        f"model {row['link_r2']} ({row['points']} points)"
        for row in tables["gamma"]
    ]


def _tuner_lines(tables: Tables) -> list[str]:
    rows = tables["tuners"]
    lines = [
        f"{' '.join(row[key] for key in KEY)}: milp-bayes / gradient {row['ratio_mean']} (least {row['ratio_least']}), "
        f"wall {row['milp_bayes_wall_s']} s and {row['gradient_wall_s']} s ({row['wall_ratio']}); "
        f"published / milp-bayes {row['published_over_milp_bayes'] or '-'}"
        for row in rows
    ]
    ratio, wall = column(rows, "ratio_mean"), column(rows, "wall_ratio")
    least = column(rows, "ratio_least").min()
    return [
        *lines,
        f"all: mean ratio {ratio.mean():.3f}, least of a case {ratio.min():.3f}, of a seed {least:.3f}; wall at most "
        f"{wall.max():.3f}",
    ]


def _gap_lines(tables: Tables) -> list[str]:
    return [
        f"{row['mesh']}, {row['optimiser']}: gap to the optimum median {100 * float(row['median_gap']):.2f} %, worst "
        f"{100 * float(row['worst_gap']):.2f} % ({row['proven']} of {row['layers']} optima proven)"
        for row in tables["gaps"]
    ]


def _dynamic_lines(tables: Tables) -> list[str]:
    lines = []
    for (experts, model, forecast), rows in group(tables["dynamic"], "experts", "model", "forecast").items():
        gain, apart = column(rows, "speedup"), column(rows, "replayed_model_speedup")
        apart = np.abs(apart - column(rows, "replayed_simulated_speedup")).max()
        lines.append(
            f"{experts} experts broadcast (paper {PAPER_DYNAMIC[experts]}), {model}, {forecast}: "
            f"mean {gain.mean():.3f}, {gain.min():.3f}-{gain.max():.3f}; "
            f"simulator at most {100 * apart:.2f} points away"
        )
    fitting = tables["window"]
    total, fit = (sum(int(row[key]) for row in fitting) for key in ("combinations", "all_fit_in"))
    return [*lines, f"the broadcasts fit their window in {fit} of {total} combinations of machine, plan and topic"]


def write(path: Path, rows: list[dict], code: Code) -> None:
    """A table and what made it; none without rows."""
    if rows:
        write_table(path, rows)
        record(path, HERE, code, {}, whole=True)


def main() -> None:
    """Derive from the tables of the jobs."""
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of reference/")
    given = parser.parse_args()
    code_pieces.watch()
    shared, to = given.shared.resolve(), folder_of_tables(HERE, given)
    tables = {p.stem: read_table(earlier_table(HERE, given, p.stem)) for p in sorted(HERE.glob("*.csv"))}
    made = derived(tables, shared)
    for name, rows in made.items():
        write(to / f"{name}.csv", rows, code_of(HERE))
    print(text(tables | made))


if __name__ == "__main__":
    main()
