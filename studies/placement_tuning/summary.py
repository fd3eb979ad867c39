"""What the tables say, as the Markdown that README.md quotes.

python studies/placement_tuning/summary.py --readme
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from cases import CASES, HERE, RUNS
from gains_summary import gains, over_layers, variations
from markdown_tables import Row, column, group, markdown, table

from jaxmoe.experiment.table import script_options

STRATEGIES = ("published", "tp_both_ways", "tp", "hybrid_complete", "ep", "ep_balanced")
MARK = "<!-- What follows is written by summary.py --readme. -->\n"
FAR = 1.1  # tuned / bound, from which on a cell is far from its bound
GAIN = 1.001  # from which on a ratio is a gain
CELL = ("TFLOPs_per_s", "GB_per_s", "batch_tokens", "latency_ns", "ports")


def spread(values: np.ndarray) -> str:
    """Mean and least of a ratio."""
    return f"{values.mean():.3f} ({values.min():.3f})" if len(values) else "-"


def exchanges(rows: Iterable[Row]) -> str:
    """The exchanges that serve best, the usual one first."""
    return ", ".join(name for name, _ in Counter(row["exchange"] for row in rows).most_common())


def main_table(rows: list[Row], trees: str) -> str:
    """Every case: the tuned plan's time and exchange, and the time of each other strategy over it."""
    lines = []
    for case in CASES:
        chosen = [row for row in rows if (row["case"], row["trees"]) == (case.name, trees)]
        if not chosen:
            continue
        by = {name: of for (name,), of in group(chosen, "strategy").items()}
        tuned = column(by["tuned"], "total_us")
        over = [spread(column(by.get(name, ()), "over_tuned")) for name in STRATEGIES]
        bound = tuned / column(by["tuned"], "bound_us")
        lines.append(
            [case.name, len(tuned), f"{tuned.mean():.1f}", exchanges(by["tuned"]), *over, f"{bound.mean():.2f}"]
        )
    head = ["case", "layers", "tuned, µs", "its exchange", *(f"over {name}" for name in STRATEGIES), "over the bound"]
    return markdown(head, lines)


def best_exchanges(rows: list[Row]) -> str:
    """Under which exchange each strategy is best, over all cases and layers."""
    return markdown(
        ["trees", "strategy", "best exchange, in how many layers"],
        (
            [trees, name, ", ".join(f"{e} {n}" for e, n in Counter(r["exchange"] for r in of).most_common())]
            for (trees, name), of in group(rows, "trees", "strategy").items()
        ),
    )


def old_claim(rows: list[Row]) -> str:
    """Published over tuned in hd_moe's own setting, and each under its best exchange."""
    lines = []
    published = [row for row in rows if row["strategy"] == "published"]
    for (case,), of in group((row for row in published if row["trees"] == "lowest_host"), "case").items():
        layers = {row["layer"] for row in of}
        best = [r for r in published if (r["case"], r["trees"]) == (case, "yes") and r["layer"] in layers]
        unicast = [r for r in published if (r["case"], r["trees"]) == (case, "no") and r["layer"] in layers]
        gain = column(of, "total_us").mean() / column(best, "total_us").mean() if best else np.nan
        ratios = (spread(column(some, "over_tuned")) for some in (of, unicast, best))
        lines.append([case, *ratios, f"{gain:.2f}"])
    head = ["case", "both at the lowest host", "both at their best, no trees", "both at their best"]
    return markdown([*head, "published plan: lowest host over best exchange"], lines)


def winners(rows: list[Row]) -> dict[tuple[str, ...], tuple[Row, Row]]:
    """By cell of the sensitivity map: the fastest row, and the fastest of another strategy."""
    found = {}
    for cell, of in group(rows, *CELL).items():
        first, second, *_ = sorted(of, key=lambda row: float(row["total_us"]))
        found[cell] = (first, second)
    return found


def sensitivity(rows: list[Row]) -> str:
    """How often each strategy wins, by hop latency."""
    won = defaultdict(Counter)
    for cell, (first, _) in winners(rows).items():
        won[cell[CELL.index("latency_ns")]][first["strategy"]] += 1
    names = sorted({name for counts in won.values() for name in counts})
    lines = ([f"{float(latency) / 1e3:g}", *(counts[name] for name in names)] for latency, counts in won.items())
    return markdown(["hop latency, µs", *(f"{name} wins" for name in names)], lines)


def machines(rows: list[Row]) -> str:
    """Every machine and model: by batch size the best shipped strategy over tuned, tuned over the bound, the limit."""
    sizes = sorted({row["batch_tokens"] for row in rows}, key=int)
    lines = []
    rows = sorted(rows, key=lambda row: (row["machine"], row["model"]))
    for (machine, model), of in group(rows, "machine", "model").items():
        by = {row["batch_tokens"]: row for row in of}
        cells = (
            f"{float(by[size]['shipped_over_tuned']):.3f}, {float(by[size]['tuned_over_bound']):.2f}, "
            f"{by[size]['limit']}"
            if size in by
            else "-"
            for size in sizes
        )
        lines.append([machine, model, *cells])
    return markdown(["machine", "model", *(f"{size} tokens" for size in sizes)], lines)


def over_machines(rows: list[Row]) -> str:
    """By what limits the tuned plan: gains over the best shipped strategy, and distances from the bound."""
    lines = []
    for (limit,), of in group(rows, "limit").items():
        gain, above = column(of, "shipped_over_tuned"), column(of, "tuned_over_bound")
        far = above > FAR
        ratios = (f"{gain.min():.4f}", f"{gain.mean():.3f}", f"{gain.max():.3f}", f"{np.median(above):.2f}")
        slowest = f"{column(of, 'wall_s').max():.0f}"
        lines.append([limit, len(of), *ratios, far.sum(), (far & (gain > GAIN)).sum(), slowest])
    head = ["limit", "cells", "least shipped / tuned", "mean", "largest", "median tuned / bound"]
    return markdown([*head, "more than 10 % above the bound", "of these with a gain", "longest tuning, s"], lines)


def gaps(rows: list[Row], cells: list[Row]) -> str:
    """Cells far above the bound: the tuned plan beside deals of experts to more and more groups.

    `TP` and the best other deal as compute + communication. The last but one column is the fastest of these deals if
    the exchange of each reached its bound.
    """
    tuned = {(row["machine"], row["model"], row["batch_tokens"]): row for row in cells}
    lines = []
    for cell, of in group(rows, "machine", "model", "batch_tokens").items():
        whole, *others = sorted(of, key=lambda row: int(row["groups"]))
        other = min(others, key=lambda row: float(row["total_us"]))
        about = tuned[cell]
        parts = [f"{float(row['compute_us']):.1f} + {float(row['communication_us']):.1f}" for row in (whole, other)]
        least = min(float(row["least_total_us"]) for row in of)
        nearest = f"{float(whole['least_total_us']) / float(whole['total_us']):.2f}"
        bound = (f"{least:.1f}", f"{least / float(about['bound_us']):.2f}")
        first = (about["bound_us"], about["tuned_us"], about["shipped_over_tuned"])
        lines.append([*cell, *first, parts[0], nearest, other["groups"], parts[1], *bound])
    head = ["machine", "model", "tokens", "bound, µs", "tuned, µs", "shipped / tuned", "TP, µs", "TP: least / total"]
    head += ["best other: groups", "µs", "these deals, any exchange: at least, µs", "that / bound"]
    return markdown(head, lines)


def gap_counts(rows: list[Row], cells: list[Row]) -> str:
    """How many cells are far from the bound, and what the deals of `gaps.csv` say of them."""
    far = [row for row in cells if float(row["tuned_over_bound"]) > FAR]
    deals = group(rows, "machine", "model", "batch_tokens")
    gains, best, reach, even = [], [], [], []
    for row in far:
        of = deals[row["machine"], row["model"], row["batch_tokens"]]
        totals = column(of, "total_us")
        gains.append(float(row["shipped_over_tuned"]))
        best.append((totals.min() / float(row["shipped_us"]), totals.min() / float(row["tuned_us"])))
        reach.append(float(row["tuned_us"]) / column(of, "least_total_us").min())
        even.append(of[int(totals.argmin())]["groups"] == "1")
    gain, (shipped, tuned), above = np.array(gains) > GAIN, np.array(best).T, np.array(reach)
    whole = [row for row in rows if row["groups"] == "1"]
    tp = [row for row in cells if row["shipped"] == "tp"]
    lines = [
        ("cells; more than 10 % above the bound", f"{len(cells)}; {len(far)}"),
        ("best shipped is TP; of these within 10 % of the bound; of these returned", _of_tp(tp)),
        ("far cells with a gain; without", f"{gain.sum()}; {(~gain).sum()}"),
        (
            "far cells where a deal is faster than the best shipped of the table; than the tuned plan",
            _faster(shipped, tuned),
        ),
        ("tuned over the best deal: gain at most; loss at most", f"{tuned.max():.3f}; {tuned.min():.3f}"),
        ("without a gain: TP is the best deal", (~gain & np.array(even)).sum()),
        (
            "without a gain: tuned within 10 % of all deals if exchanges reached their bounds",
            (~gain & (above < FAR)).sum(),
        ),
        ("without a gain: the others, tuned over that", _list(above[~gain & (above >= FAR)])),
        ("with a gain: more than 10 % above that", _list(above[gain & (above >= FAR)])),
        ("TP: total over what any exchange could make of it, at most", f"{_over_least(whole):.3f}"),
    ]
    return markdown(["what", "cells or ratio"], lines)


def any_exchange(rows: list[Row], deals: list[Row], cells: list[Row]) -> str:
    """Cells far above what deals could take by single nodes: what they could by trees, and what trees do take.

    Deals that single nodes already put within 10 % of the tuned plan are left aside in the least by trees.
    """
    tuned = {(row["machine"], row["model"], row["batch_tokens"]): row for row in cells}
    before = group(deals, "machine", "model", "batch_tokens")
    lines = []
    for cell, of in group(rows, "machine", "model", "batch_tokens").items():
        seconds, nodes = float(tuned[cell]["tuned_us"]), column(before[cell], "least_total_us").min()
        least, taken = column(of, "least_total_us").min(), min(of, key=lambda row: float(row["balanced_total_us"]))
        over = (nodes, least, float(taken["balanced_total_us"]))
        parts = f"{float(taken['compute_us']):.2f} + {float(taken['balanced_us']):.2f}"
        ratios = (f"{seconds / each:.2f}" for each in over)
        lines.append([*cell, tuned[cell]["tuned_us"], *ratios, taken["groups"], parts])
    head = ["machine", "model", "tokens", "tuned, µs", "tuned / least by single nodes", "/ least by trees"]
    return markdown([*head, "/ balanced trees", "their groups", "their µs"], lines)


def _of_tp(rows: list[Row]) -> str:
    near = (column(rows, "tuned_over_bound") <= FAR).sum()
    return f"{len(rows)}; {near}; {(column(rows, 'shipped_over_tuned') == 1).sum()}"


def _faster(shipped: np.ndarray, tuned: np.ndarray) -> str:
    return f"{(shipped < 1 - 1e-4).sum()}; {(tuned < 1 - 1e-4).sum()}"


def _list(values: np.ndarray) -> str:
    return ", ".join(f"{value:.2f}" for value in np.sort(values)) or "-"


def _over_least(rows: list[Row]) -> float:
    return float((column(rows, "total_us") / column(rows, "least_total_us")).max())


def least(rows: list[Row]) -> str:
    """The smallest ratios: nothing may be below 1."""
    lines = []
    main = [row for row in rows if row["strategy"] != "tuned"]
    for row in sorted(main, key=lambda r: float(r["over_tuned"]))[:5]:
        lines.append([row["job"], row["strategy"], row["plan"], row["exchange"], row["over_tuned"]])
    return markdown(["job", "strategy", "plan", "exchange", "over tuned"], lines)


def text(folder: Path) -> str:
    """All of it."""
    main, cells, there = (table(name, folder) for name in ("main", "sensitivity", "machines"))
    parts = [("The published claim", old_claim(main))]
    parts += [("Main table, all exchanges: mean (least)", main_table(main, "yes"))]
    parts += [("Main table, no trees in the network: mean (least)", main_table(main, "no"))]
    parts += [("Best exchanges", best_exchanges(main)), ("Smallest ratios", least(main))]
    parts += [
        ("Who wins, cells of the map", sensitivity(cells)),
        ("Machines, by what limits them", over_machines(there)),
    ]
    parts += [("Machines: shipped / tuned, tuned / bound, limit", machines(there))]
    if deals := table("gaps", folder):
        parts += [("Cells far above the bound, counted", gap_counts(deals, there))]
        parts += [("Cells far above the bound", gaps(deals, there))]
    if trees := table("any_exchange", folder):
        parts += [("Cells far above all deals: what a new exchange could give", any_exchange(trees, deals, there))]
    if parted := table("gains", folder):
        parts += [("With a part of tuning left out, and plans of others", gains(parted))]
        parts += [("Over all layers", over_layers(parted))]
    if apart := table("uneven", folder):
        parts += [("Uneven machines", gains(apart)), ("Over all uneven machines", over_layers(apart))]
    if varied := table("variations", folder):
        parts += [("Where the gain vanishes: best shipped plan / tuned plan", variations(varied))]
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in parts)


def main() -> None:
    """Print it, or put it into README.md."""
    parser = script_options(__doc__)
    parser.add_argument("--quick", action="store_true", help="of the tables of a trial")
    parser.add_argument("--readme", action="store_true", help="put it at the end of README.md")
    given = parser.parse_args()
    if not given.readme:
        print(text(RUNS / "quick" if given.quick else HERE))
        return
    readme = HERE / "README.md"
    kept = readme.read_text().partition(MARK)[0]
    readme.write_text(f"{kept}{MARK}\n{text(HERE)}\n")


if __name__ == "__main__":
    main()
