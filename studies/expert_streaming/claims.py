"""Claims of the paper beside what the tables have, a verdict each: `python studies/expert_streaming/claims.py`.

Writes `claims.csv`, and prints how many verdicts of each kind a reading has. In `STUDY` a link carries 288 GB/s each
way and A2 loads ahead. In `EACH_WAY` 288 GB/s are all that a die has, both ways of both its links, as VI-D counts: 72
each way. The other readings say what they change of the first.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from statistics import mean

from jaxmoe.experiment.claims import Claim, Finding, claims_script
from jaxmoe.files import read_table

HERE = Path(__file__).parent
STUDY, EACH_WAY = "as in the study", "72 GB/s each way"
AHEAD = "second buffer for EP"
SERIAL = "A2 alone in turn"
OWN = "A2 alone in turn, by dies with tokens"
OWN_EACH_WAY = f"{EACH_WAY}, by dies with tokens"
TOGETHER = "places taken, requests together"
WITHIN = 0.2  # of a figure
PINS = 32 * 24 / 8  # GB/s each way of a module of 32 pins (Table I)
Rows = list[dict[str, str]]
Claims = Iterator[tuple[Claim, Mapping[str, Finding]]]


def read(name: str, **values: str) -> Rows:
    return [row for row in read_table(HERE / f"{name}.csv") if all(row[key] == each for key, each in values.items())]


def cells(name: str) -> list[dict[str, dict[str, str]]]:
    """Rows of every model and number of tokens by strategy, slices in 8."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in read(name):
        if row["micro_slices"] in ("", "8"):
            found.setdefault((row["model"], row["tokens"]), {})[row["strategy"]] = row
    return list(found.values())


def seconds(cell: dict[str, dict[str, str]], *strategies: str) -> float:
    return min(float(cell[name]["simulated_s"]) for name in strategies)


def layer_alone() -> Claims:
    """VI-B, Fig. 9 and 12."""
    tables = {STUDY: cells("layer"), EACH_WAY: cells("layer_each_way")}
    over = {
        name: [seconds(cell, "ep", "hydra") / seconds(cell, "fse_paired") for cell in rows]
        for name, rows in tables.items()
    }
    both = ("ep_prefetch", "hydra_prefetch")
    for name, rows in tables.items():
        over[f"{name}, {AHEAD}"] = [seconds(cell, *both) / seconds(cell, "fse_paired") for cell in rows]
    for claim, pick in (
        (
            Claim("least speed-up over EP and Hydra", "Abstract: 1.22-2.00x over state-of-the-art", 1.22, None, 0.05),
            min,
        ),
        (Claim("largest speed-up over EP and Hydra", "Abstract: 1.22-2.00x", 2.0, 2.0, WITHIN), max),
        (
            Claim("part of all cells in which FSE-DP is fastest", "VI-B: in most configurations", 0.5, None, 0.0),
            lambda ratios: mean(ratio > 1 for ratio in ratios),
        ),
    ):
        yield claim, {name: Finding(float(pick(ratios))) for name, ratios in over.items()}
    hydra = {name: [seconds(cell, "ep") / seconds(cell, "hydra") for cell in rows] for name, rows in tables.items()}
    claim = Claim("Hydra over EP, mean", "VI-B: shows no obvious improvement over EP", 1.0, 1.0, 0.1)
    yield claim, {name: Finding(mean(ratios)) for name, ratios in hydra.items()}
    held = {name: [memory(cell, "fse_paired") for cell in rows] for name, rows in tables.items()}
    claim = Claim("most MB held", "VI-B: less than 32 MB", 0.0, 32.0, 0.0)
    yield claim, {name: Finding(max(each)) for name, each in held.items()}
    saved = {
        name: [1 - memory(cell, "fse_paired") / memory(cell, "ep") for cell in rows] for name, rows in tables.items()
    }
    claim = Claim("memory saved at best, %", "Abstract: up to 78.8 %", 78.8, 78.8, 15.0, "points")
    yield claim, {name: Finding(100 * max(each)) for name, each in saved.items()}


def memory(cell: dict[str, dict[str, str]], strategy: str) -> float:
    return float(cell[strategy]["package_memory_MB"])


def paired_load() -> Claims:
    """VI-B, VI-C: A1 to A4."""
    named = {STUDY: STUDY, SERIAL: SERIAL, OWN: OWN, EACH_WAY: "D2D 72 GB/s each way"}

    def ratios(reading: str, tokens: str, over: str, under: str) -> list[float]:
        rows = read("readings", reading=named[reading], tokens=tokens)
        return [float(row[f"{over}_s"]) / float(row[f"{under}_s"]) for row in rows]

    def found(tokens: str, over: str, under: str) -> dict[str, float]:
        return {reading: mean(ratios(reading, tokens, over, under)) for reading in named}

    few, many = found("16", "A2", "A3"), found("256", "A2", "A3")
    claim = Claim("A3 over A2, 16 tokens", "VI-B: paired-load yields significant improvements", 1.05, None, 0.0)
    yield claim, {reading: Finding(ratio) for reading, ratio in few.items()}
    claim = Claim("gain of pairs, 16 over 256 tokens", "VI-B: when the token count is relatively low", 1.05, None, 0.0)
    yield claim, {reading: Finding(few[reading] / many[reading]) for reading in named}
    claim = Claim("A2 over EP, 16 tokens", "VI-B, Fig. 9: lowest latency", 1.0, None, 0.0)
    yield claim, {reading: Finding(ratio) for reading, ratio in found("16", "ep", "A2").items()}
    claim = Claim("A4 over A3, 64 tokens", "VI-C: Rule 5 yields only marginal gains", 1.0, 1.0, 0.1)
    yield claim, {reading: Finding(ratio) for reading, ratio in found("64", "A3", "A4").items()}
    claim = Claim("A2 over A1, 16 tokens, mean", "VI-C, Fig. 15: fine-grained flows", 1.05, None, 0.0)
    first = [cell for cell in cells("layer") if cell["fse"]["tokens"] == "16"]
    yield claim, {STUDY: Finding(mean(seconds(cell, "fse_naive") / seconds(cell, "fse") for cell in first))}
    claim = Claim(
        "A5 over A3, slack 20 %, mean", "VI-C: token buffering significantly improve performance", 1.02, None, 0.0
    )
    empty, taken = (
        mean(
            float(row["over_A3"]) for row in read("buffering", slack="0.2", spare_requests=spare, arrive_together=asked)
        )
        for spare, asked in (("0", "False"), ("1", "True"))
    )
    yield claim, {STUDY: Finding(empty), TOGETHER: Finding(taken)}


def design_space() -> Claims:
    """VI-D, Fig. 16 and 17: tiles of 8 tokens; grids by the model."""
    enough = [row for row in read("grid", panel="a", tile="8", sram_MB="16") if float(row["utilisation"]) >= 0.6]
    claim = Claim("GB/s of DDR a die for 60 %", "VI-D: 48 GB/s per die are required", 48.0, 48.0, WITHIN)
    yield claim, {STUDY: Finding(min(float(row["ddr_GB_per_s"]) for row in enough))}
    claim = Claim("utilisation at 48 GB/s and 16 MB a die", "VI-D: a utilization rate higher than 60%", 0.6, None, 0.0)
    links = {STUDY: "288", "144 GB/s each way": "144", EACH_WAY: "72"}
    at = {"loaded_by": "all", "micro_slices": "8", "sram_MB": "16"}
    rows = {name: read("knee", link_GB_per_s=link, **at)[0] for name, link in links.items()}
    own = {"loaded_by": "trajectory", "link_GB_per_s": "72", "micro_slices": "8"}
    rows[OWN_EACH_WAY] = read("knee", **own, sram_MB="16")[0]
    yield claim, {name: Finding(float(row["utilisation"])) for name, row in rows.items()}
    claim = Claim("MB a die from which SRAM helps no more", "VI-D: 16MB or more of on-chip memory", 16.0, 16.0, WITHIN)
    yield (
        claim,
        {
            f"{name}{told}": Finding(enough_sram(read("knee", loaded_by="all", link_GB_per_s=link, micro_slices=cut)))
            for name, link in links.items()
            for cut, told in (("8", ""), ("1", ", slices not cut"))
        }
        | {OWN_EACH_WAY: Finding(enough_sram(read("knee", **own)))},
    )
    claim = Claim("GB/s of D2D a die", "VI-D: even up to 512GB/s, 3 UCIe (x32) modules", 512.0, 512.0, WITHIN)
    one_way = enough_link([row for row in read("grid", panel="b", tile="8") if near(row["ddr_GB_per_s"], 48)])
    yield claim, {STUDY: Finding(one_way), EACH_WAY: Finding(4 * one_way)}
    claim = Claim("x32 modules for 512 GB/s of D2D", "VI-D: equivalent to 3 UCIe (x32) modules", 3.0, 3.0, 0.0)
    yield claim, {STUDY: Finding(float(ceil(512 / PINS))), EACH_WAY: Finding(float(ceil(512 / (2 * PINS))))}
    claim = Claim("best number of micro-slices, most", "VI-D: below 10 is preferred", 1.0, 9.99, 0.0)
    simulated = max(best_cut(read("layer", strategy="fse_paired", model=model, tokens="256")) for model in models())
    modelled = max(best_cut(read("slices", model=model, sram_MB="8"), "layer_s") for model in ("phi-3.5-moe", QWEN3))
    yield claim, {STUDY: Finding(simulated), "as in the study, model": Finding(modelled)}
    claim = Claim(
        "loss by 16 micro-slices, Qwen3 over Phi", "VI-D: more pronounced for smaller experts", 1.0, None, 0.0
    )
    yield claim, {STUDY: Finding(loss_by_cut(QWEN3) / loss_by_cut("phi-3.5-moe"))}


QWEN3 = "qwen3-30b-a3b"


def models() -> list[str]:
    return list(dict.fromkeys(row["model"] for row in read("layer")))


def near(text: str, value: float) -> bool:
    return abs(float(text) / value - 1) < 1e-3


def enough_sram(rows: Rows) -> float:
    """The least SRAM whose utilisation is within 2 % of the most."""
    most = max(float(row["utilisation"]) for row in rows)
    return min(float(row["sram_MB"]) for row in rows if float(row["utilisation"]) >= 0.98 * most)


def enough_link(rows: Rows) -> float:
    most = max(float(row["utilisation"]) for row in rows)
    return min(float(row["d2d_GB_per_s"]) for row in rows if float(row["utilisation"]) >= 0.98 * most)


def best_cut(rows: Rows, key: str = "simulated_s") -> float:
    return float(min(rows, key=lambda row: float(row[key]))["micro_slices"])


def loss_by_cut(model: str) -> float:
    """Time of 16 micro-slices over the best of all numbers, 256 tokens."""
    own = read("layer", strategy="fse_paired", model=model, tokens="256")
    time = {row["micro_slices"]: float(row["simulated_s"]) for row in own}
    return time["16"] / min(time.values())


def larger_arrays() -> Claims:
    """VI-E, Fig. 18: what 4x4 keeps of the utilisation of 2x2, beside what the best of the others keeps."""
    claim = Claim("utilisation kept on 4x4 beside EP, 1,024 tokens", "VI-E, Fig. 18", 1.0, None, 0.0)

    def kept(strategy: str) -> float:
        few, many = (
            float(read("arrays", array=array, tokens="1024", strategy=strategy)[0]["utilisation"])
            for array in ("2x2", "4x4")
        )
        return many / few

    yield claim, {STUDY: Finding(kept("fse_paired") / kept("ep"))}
    claim = Claim("speed-up over EP and Hydra on 4x4, 1,024 tokens", "VI-E", 1.0, None, 0.0)
    row = {each["strategy"]: each for each in read("arrays", array="4x4", tokens="1024")}
    yield claim, {STUDY: Finding(seconds(row, "ep", "hydra") / seconds(row, "fse_paired"))}


def not_attempted() -> Claims:
    for name, sentence, because in (
        ("scheduler, mm2", "V-B: only 0.43 mm2", "no circuits are synthesised here"),
        ("power of a die, mW", "Table I", "the paper's constants are taken, nothing predicts them"),
    ):
        yield Claim(name, sentence, 0.0, None, 0.0), {STUDY: Finding(None, because=because)}


PARTS = (layer_alone, paired_load, design_space, larger_arrays, not_attempted)

if __name__ == "__main__":
    claims_script(__doc__, HERE, PARTS)
