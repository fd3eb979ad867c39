"""Claims of the paper beside what the tables have, a verdict each: `python studies/hd_moe/claims.py`.

Writes `claims.csv`, and prints how many verdicts of each kind a reading has. `BEFORE` is what this study had: windows
of the experts alone, and Fig. 15 as the mean of Mixtral and DeepSeek. `NOW`: the window is the whole layer before with
its attention, and V-C's figures are those of DeepSeek, for which its ablation is. Readings of bytes are by their own
names. Attention was fitted on the published whole-model times, so speed-ups of the whole model are calibrated at best.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median

from jaxmoe.experiment.claims import Claim, Finding, claims_script
from jaxmoe.files import read_table

HERE = Path(__file__).parent
MIXTRAL, DEEPSEEK = "mixtral-8x7b", "deepseek-v2-lite"
BEFORE, NOW = "window of the experts alone, both models", "window of the whole layer, DeepSeek"
IDLE = "what the layer leaves idle of its links, DeepSeek"
BYTES = {
    "published": "one byte where results gather, mean frequencies",
    "one_byte": "one byte where results gather",
    "mean_frequencies": "four bytes, mean frequencies",
    "equations": "four bytes",
}
ATTENTION = {  # of a layer: of the published times, to which it was fitted, and by the machine's roofline
    "published": f"{NOW}, time of the layer with attention",
    "roofline": f"{NOW}, time of the layer with attention by the roofline",
}
GAIN = 0.05  # within this part of a speed-up that is near 1
Claims = Iterator[tuple[Claim, Mapping[str, Finding]]]


def read(name: str, **values: str) -> list[dict[str, str]]:
    return [row for row in read_table(HERE / f"{name}.csv") if all(row[key] == each for key, each in values.items())]


def whole_model() -> Claims:
    """V-B, Fig. 8 and 9: Mixtral and DeepSeek."""
    for over, least, most in (("tp", 1.1, 1.8), ("ep", 1.1, 1.5), ("hybrid", 1.0, 1.4)):
        rows = [row for row in read("published", over=over) if row["model"] in (MIXTRAL, DEEPSEEK)]
        claim = Claim(f"node-link balance over {over}, mean", "V-B: on average", least, most, 0.0)
        yield (
            claim,
            {told: Finding(mean(float(row[f"ours_{name}"]) for row in rows), True) for name, told in BYTES.items()},
        )
    rows = read("published", over="hybrid", model=MIXTRAL, mesh="8x8")
    claim = Claim(
        "node-link balance over hybrid, Mixtral on 8x8", "V-B: hybrid achieves slightly better", 0.9, 1.0, 0.0
    )
    yield (
        claim,
        {told: Finding(mean(float(row[f"ours_{name}"]) for row in rows), True) for name, told in BYTES.items()},
    )


def estimates() -> Claims:
    """IV-B: Fig. 5 and Table III."""
    for row in read("table_iii"):
        named = f"µs of a ring, {row['latency_us']} µs, {row['bandwidth_Gb_per_s']} Gb/s"
        for ours, theirs in (("formula_us", "paper_analytical_us"), ("simulated_us", "paper_astra_sim_us")):
            paper, value = float(row[theirs]), Finding(float(row[ours]))
            kind = ours.removesuffix("_us")
            yield Claim(f"{named}, {kind}", "Table III", paper, paper, 0.02), {BEFORE: value, NOW: value}
    kinds = {row["kind"] for row in read("gamma")} - {"all"}
    found = {
        "plans of one kind": mean(float(row["node_r2"]) for row in read("gamma") if row["kind"] in kinds),
        "all plans": mean(float(row["node_r2"]) for row in read("gamma", kind="all")),
        "one batch size": median(float(row["r2"]) for row in read("gamma_by_batch")),
    }
    claim = Claim("R2 of the linear estimate", "IV-B2, Fig. 5", 0.96, 0.96, 0.05)
    yield claim, {reading: Finding(value) for reading, value in found.items()}


ENDS = {"1.0 to 3.0": (1.0, 3.0), "1.5": (1.5, 1.5), "2.0 on average": (2.0, 2.0), "above 1": (1.0, None)}
ENDS["1.2 on average"] = (1.2, 1.2)


def stages() -> Claims:
    """V-C1 and V-C2, Fig. 10, 11 and 13: means over machines and batch sizes."""
    for row in read("stages"):
        least, most = ENDS[row["paper"]]
        within = 0.0 if least != most else GAIN if least == 1.2 else 0.1
        name = f"{row['part']} of {row['time_of']} over {row['over']}"
        claim = Claim(name, f"V-C, Fig. {row['figure']}", least, most, within)
        yield claim, {told: Finding(float(row[name].split()[0])) for name, told in BYTES.items()}


def dynamic() -> Claims:
    """V-C3, Fig. 15."""
    for experts, paper in (("2", 1.15), ("5", 1.25)):
        claim = Claim(f"gain of {experts} broadcasts", "V-C3: the average speedup", paper, paper, GAIN)
        found = {BEFORE: gain(experts, "moving average"), NOW: gain(experts, "moving average", DEEPSEEK)}
        for forecast in ("cross-layer", "perfect"):
            found[f"{NOW}, {forecast} forecast"] = gain(experts, forecast, DEEPSEEK)
        found |= {told: gain_with_attention(experts, source) for source, told in ATTENTION.items()}
        yield claim, {reading: Finding(value) for reading, value in found.items()}
        claim = Claim(f"part of combinations in which {experts} fit", "V-C3: has enough time", 1.0, 1.0, 0.0)
        layer, idle = "last_layer, published", "idle_links, published"
        fit = {BEFORE: fitting(experts, "last"), NOW: fitting(experts, layer, DEEPSEEK)}
        fit |= {
            IDLE: fitting(experts, idle, DEEPSEEK),
            "window of the whole layer, Mixtral": fitting(experts, layer, MIXTRAL),
        }
        yield claim, {reading: Finding(value) for reading, value in fit.items()}
    for matrices, told in (("1", NOW), ("3", f"{NOW}, three matrices an expert")):
        rows = read("beside", matrices=matrices)
        there = mean(float(row["simulated_weights_s"]) <= float(row["simulated_layer_s"]) for row in rows)
        claim = Claim("part of broadcasts that are there in time, simulated", "V-C3: has enough time", 1.0, 1.0, 0.0)
        yield claim, {told: Finding(float(there))}


def gain(experts: str, forecast: str, *models: str) -> float:
    """Static over dynamic time, mean over plans and topics."""
    rows = read("dynamic", experts=experts, forecast=forecast)
    return mean(float(row["speedup"]) for row in rows if not models or row["model"] in models)


def gain_with_attention(experts: str, source: str) -> float:
    """The same of DeepSeek's whole layers, to which attention adds alike, by the moving average."""
    times = {
        (row["plan"], row["topic"]): float(row[f"attention_{source}_s"])
        for row in read("windows", experts=experts, model=DEEPSEEK)
    }
    rows = read("dynamic", experts=experts, forecast="moving average", model=DEEPSEEK)
    added = [(times[row["plan"], row["topic"]], float(row["static_s"]), float(row["dynamic_s"])) for row in rows]
    return mean((attention + static) / (attention + moved) for attention, static, moved in added)


def fitting(experts: str, rule: str, *models: str) -> float:
    rows = [row for row in read("windows", experts=experts) if not models or row["model"] in models]
    return float(mean(float(row[rule]) >= float(experts) for row in rows))


def not_attempted() -> Claims:
    for name, sentence, because in (
        ("hours of the optimiser", "V-A5: several hours", "open solvers with 60 s stand in"),
        ("Qwen2's speed-ups", "V-B", "no trace of it is at hand, and its published times are of other sizes"),
    ):
        yield Claim(name, sentence, 0.0, None, 0.0), {BEFORE: Finding(None, because=because)}


PARTS = (whole_model, estimates, stages, dynamic, not_attempted)

if __name__ == "__main__":
    claims_script(__doc__, HERE, PARTS)
