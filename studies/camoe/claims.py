"""Claims of the paper beside what the tables have, a verdict each: `python studies/camoe/claims.py`.

Writes `claims.csv`. `ALL`: Table 2 is counted on the tokens of all nodes, as Table 1. `RANK`: on those of node 1, whose
links to all but node 0 are fast; the biases and all that is calibrated are those of Table 1.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxmoe.experiment.claims import Claim, Finding, claims_script
from jaxmoe.files import read_table

HERE = Path(__file__).parent
ALL, RANK = "counted on all nodes", "counted on node 1"
NODE = "1"
WITHIN, POINTS = 0.2, 2.0
Claims = Iterator[tuple[Claim, Mapping[str, Finding]]]


def read(name: str, **values: str) -> list[dict[str, str]]:
    return [row for row in read_table(HERE / f"{name}.csv") if all(row[key] == each for key, each in values.items())]


def profiler() -> Claims:
    """4.3, Fig. 6: the profiler on A.3's network, whose delays and rates are stated."""
    for row in read("fits", network="without buckets"):
        path = f"{row['phase']} {row['source']} -> {row['destination']}"
        for name, unit in (("alpha_ms", "ms"), ("beta_ms_per_B", "ms/B")):
            paper, value = float(row[f"paper_{name}"]), Finding(float(row[name]))
            claim = Claim(f"{name.split('_')[0]} of {path}, {unit}", "4.3, Fig. 6", paper, paper, WITHIN)
            yield claim, {ALL: value, RANK: value}


def latency() -> Claims:
    """Table 1, and the first row of Table 2: the mean at 0 and 0.25, cv and avg_layer_cv are calibrated."""
    first, *some = read("table1", own_node="counted")
    for name in ("mean_ms", "p95_ms", "cv", "avg_layer_cv"):
        paper = float(first[f"paper_{name}"])
        value = Finding(float(first[name]), fitted=name != "p95_ms")
        yield Claim(f"{name} at lambda 0", "Tables 1 and 2", paper, paper, WITHIN), {ALL: value, RANK: value}
    for row in some:
        strength = row["lambda"]
        for name, shown, within in (("mean_ms", "mean", 3.0), ("p95_ms", "p95", 5.0)):
            paper = float(row[f"paper_{name}_change_percent"])
            claim = Claim(f"{shown} at lambda {strength}, %", "Table 1", paper, paper, within, "points")
            value = Finding(float(row[f"{name}_change_percent"]), name == "mean_ms" and strength == "0.25")
            yield claim, {ALL: value, RANK: value}


def selectivity() -> Claims:
    """Table 2."""
    counted = {ALL: read("ranks", counted_on="all"), RANK: read("ranks", counted_on=NODE, tokens="3046")}
    for at in range(1, 6):
        rows = {reading: each[at] for reading, each in counted.items()}
        strength = rows[ALL]["lambda"]
        for name, sentence in (("cv", "4.5: cv +11.1 %"), ("avg_layer_cv", "4.5: remains flat, about 1.51")):
            paper = float(rows[ALL][f"paper_{name}_change_percent"])
            within = POINTS if name == "cv" else 0.75
            claim = Claim(f"{name} at lambda {strength}, %", f"Table 2, {sentence}", paper, paper, within, "points")
            yield claim, {reading: Finding(float(row[f"{name}_change_percent"])) for reading, row in rows.items()}
        for name in ("kl", "avg_layer_kl"):
            paper = float(rows[ALL][f"paper_{name}"])
            claim = Claim(f"{name} at lambda {strength}", "Table 2", paper, paper, WITHIN)
            yield claim, {reading: Finding(float(row[name])) for reading, row in rows.items()}


def few_tokens() -> Claims:
    """What layers differ more than all together, were it chance in the counts of few tokens."""
    (row,) = read("ranks", counted_on=NODE, tokens="220", **{"lambda": "0.25"})
    more = {name: float(row[f"{name}avg_layer_kl"]) - float(row[f"{name}kl"]) for name in ("paper_", "")}
    claim = Claim("avg_layer_kl less KL at lambda 0.25", "Table 2", more["paper_"], more["paper_"], WITHIN)
    yield claim, {RANK: Finding(all_of_it(NODE)), f"{RANK}, 220 tokens": Finding(more[""])}


def all_of_it(node: str) -> float:
    (row,) = read("ranks", counted_on=node, tokens="3046", **{"lambda": "0.25"})
    return float(row["avg_layer_kl"]) - float(row["kl"])


def capacity() -> Claims:
    """What lambda 0.25 does to the balance within a layer where experts have a limit: the farthest of all factors."""
    rows = [row for row in read("capacity") if float(row["lambda"]) == 0.25 and row["capacity_factor"] != "none"]
    changes = [float(row["avg_layer_cv_change_percent"]) for row in rows]
    name, sentence = "avg_layer_cv under capacity limits, %", "4.5: capacity limits preserve within-layer balance"
    paper = 100 * (1.5079 / 1.5118 - 1)
    claim = Claim(name, sentence, paper, paper, 0.75, "points")
    none = Finding(None, because="it is counted on all nodes")
    yield claim, {ALL: Finding(max(changes, key=lambda each: abs(each - paper))), RANK: none}


def other_figures() -> Claims:
    """Fig. 1 and 5, and what has no table here."""
    part = {row["part"]: float(row["percent"]) for row in read("breakdown")}
    claim = Claim("dispatch over combine", "Fig. 1: dispatch overwhelmingly dominates", 2.0, None, 0.0)
    value = Finding(part["dispatch"] / part["combine"])
    yield claim, {ALL: value, RANK: value}
    slow = {row["slowdown"]: float(row["simulated_ms"]) for row in read("slow_endpoint", others="1")}
    claim = Claim(
        "all-to-all with one endpoint 8 times as slow", "2.2, Fig. 5: the slowest sets the time", 8.0, 8.0, 0.05
    )
    value = Finding(slow["8"] / slow["1"])
    yield claim, {ALL: value, RANK: value}
    paths = [float(row["alpha_ns"]) for row in read("unlike_paths")]
    claim = Claim(
        "slowest path inside a node over the fastest", "2.2.1, Fig. 3: nearly a factor of 20", 20.0, 20.0, 0.05
    )
    value = Finding(max(paths) / min(paths), fitted=True)  # both latencies are the paper's
    yield claim, {ALL: value, RANK: value}
    none = Finding(None, because="no model is run, so there is no accuracy")
    yield (
        Claim("accuracy at lambda 0.25, points", "4.4: about 1.2 below", 0.0, None, 0.0),
        {ALL: none, RANK: none},
    )


PARTS = (profiler, latency, selectivity, few_tokens, capacity, other_figures)

if __name__ == "__main__":
    claims_script(__doc__, HERE, PARTS)
