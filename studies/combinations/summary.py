"""The best system of every paper and the best combination of two, for each machine and seed: `summary.csv`."""

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
PAPERS = ("hd_moe", "camoe", "moentwine", "wafer_gpu", "expert_streaming")
TREE = "token_home_tree"
NETWORK = ("dispatch_us", "combine_us")


def numbers(row: dict[str, str]) -> Row:
    """A row of `ways.csv`: what it has, times and figures as numbers."""
    texts = ("machine", "papers", "way", "reason")
    return {
        key: value if key in texts else int(value) if key == "seed" else float(value)
        for key, value in row.items()
        if value
    }


def summary(rows: Iterable[Row]) -> list[Row]:
    """A line for each machine and seed, in the order of the rows."""
    rows = list(rows)
    cases = dict.fromkeys((row["machine"], row["seed"]) for row in rows)
    return [_line(case, [row for row in rows if (row["machine"], row["seed"]) == case]) for case in cases]


def _line(case: tuple[str, int], rows: Sequence[Row]) -> Row:
    timed = [row for row in rows if "total_us" in row]
    alone = [row for row in timed if "+" not in row["papers"]]
    pairs = [row for row in timed if "+" in row["papers"]]
    single, pair = (min(each, key=lambda row: row["total_us"]) for each in (alone, pairs))
    line: Row = {"machine": case[0], "seed": case[1]}
    for paper in PAPERS:
        own = [row["total_us"] for row in alone if row["papers"] == paper]
        line[f"{paper}_us"] = min(own) if own else ""
    line |= {"best": single["way"], "combination": pair["way"], "papers": pair["papers"]}
    line |= {"best_us": single["total_us"], "combination_us": pair["total_us"]}
    line["faster_percent"] = _faster(single["total_us"], pair["total_us"])
    # No paper has trees, and where no router adds vectors up there are none.
    plain = [[row for row in each if TREE not in row["way"]] for each in (alone, pairs)]
    own, both = (min(each, key=lambda row: row["total_us"]) for each in plain)
    line |= {"best_without_trees": own["way"], "combination_without_trees": both["way"]}
    line |= {"best_without_trees_us": own["total_us"], "combination_without_trees_us": both["total_us"]}
    line["faster_without_trees_percent"] = _faster(own["total_us"], both["total_us"])
    # That of moentwine's groups, which is the same for all; expert_streaming has one of its own.
    attention = max((row["attention_us"] for row in timed if "moentwine" in row["papers"]), default=0.0)
    line["layer_faster_without_trees_percent"] = _faster(own["total_us"] + attention, both["total_us"] + attention)
    # The simulator has its own best: what the model ranks first need not be first there.
    line["simulated_faster_percent"] = _faster(*(_least("simulated_us", each) for each in (alone, pairs)))
    line["simulated_without_trees_percent"] = _faster(*(_least("simulated_us", each) for each in plain))
    errors = [row["model_of_replayed_us"] / row["simulated_us"] - 1 for row in (single, pair) if "simulated_us" in row]
    line["largest_error_percent"] = 100 * max(map(abs, errors))
    freed = {"network": _saved(NETWORK, single, pair), "all_reduce": _saved(("all_reduce_us",), single, pair)}
    freed["experts"] = _experts(single) - _experts(pair)
    line |= {f"{name}_saved_us": saved for name, saved in freed.items()}
    return line | {"retained_gate_mass": pair.get("retained_gate_mass", 1.0)}


def _least(figure: str, rows: Sequence[Row]) -> float:
    return min(row[figure] for row in rows if figure in row)


def _experts(row: Row) -> float:
    """Time of the experts; of systems that read weights meanwhile that of reading, which has the other inside."""
    return row.get("fetch_us", row.get("stream_us", row.get("compute_us", 0.0)))


def _faster(before: float, after: float) -> float:
    """How many percent of the time before are saved."""
    return 100 * (1 - after / before)


def _saved(stages: Sequence[str], before: Row, after: Row) -> float:
    return sum(before.get(stage, 0.0) - after.get(stage, 0.0) for stage in stages)
