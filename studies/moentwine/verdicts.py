"""Every claim of the paper beside what the tables have, a verdict each: verdicts.csv, made by study.py.

Four readings: memory and products of a die overlap, as before, or add up; links have 1 TB/s each way, or 4 TB/s ("4
TB/s intra-wafer bandwidth between dies", I). Communication is by Eq. 1; its figures under congestion are in claims.csv.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

from jaxmoe.experiment.claims import Claim, Found, claim_rows
from jaxmoe.files import read_table

OVERLAP, ADD, WIDE = "overlap", "add", "add, 4 TB/s a link"
WITHIN, POINTS = 0.2, 15.0  # of a figure; points of per cent, those of claims.csv
OWN = "256"  # tokens a device in prefill: the setting of the balancers (1,024 of a group of four)
Rows = list[dict[str, str]]
Claims = Iterator[tuple[Claim, Mapping[str, Found]]]


def select(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def verdict_rows(folder: Path) -> Iterator[dict[str, object]]:
    """All claims from the tables of a folder."""

    def read(name: str) -> Rows:
        return read_table(folder / f"{name}.csv")

    yield from claim_rows(communication(read("claims")))
    yield from claim_rows(performance(read("performance"), read("balancing_adding"), read("balancing_machines")))
    yield from claim_rows(balancers(read("balancing_balance"), read("balancing_loads")))
    yield from claim_rows(parts(read("balancing_parts")))
    yield from claim_rows(sharing(read("balancing_sharing")))


def communication(rows: Rows) -> Claims:
    """VI-B, by Eq. 1. What is over DGX was calibrated by the bandwidth of a link; the rest does not depend on it."""
    for row in rows:
        least = float(row["paper_%"])
        floor = row["within_points"] == "at least"
        claim = Claim(
            row["claim"],
            f"VI-B, Fig. {row['claim'].split(':')[0]}",
            least,
            None if floor else least,
            0.0 if floor else float(row["within_points"]),
            "points",
        )
        own = Found(float(row["eq_1_%"]), fitted="over DGX" in row["claim"])
        yield claim, {OVERLAP: own, ADD: own, WIDE: Found(float(row["eq_1_wide_%"]))}


def performance(rows: Rows, adding: Rows, machines: Rows) -> Claims:
    """I, III-A and VI-D: experts of DeepSeek-V3, the all-to-all beside them, and copies.

    Before, NVL72 and DGX had 64 tokens of a group, each with its all-to-all; now experts alone, by the sum.
    """
    few = _experts(rows, "64", "overlap")
    times = {name: _experts(rows, "1024", name) for name in ("overlap", "add")}
    sent = select(rows, tokens="64", rule="eq_1", memory_and_products="overlap")
    speed = {row["machine"]: float(row["tokens_per_us_and_device"]) for row in sent}
    best = max(rate for machine, rate in speed.items() if machine.startswith("dgx"))
    claim = Claim("NVL72 over DGX, %", "I and III-A: 37 %, a 35 % gain", 35, 37, POINTS, "points")
    rack, cluster, wafers = "nvl72", "dgx_b200_4x8", "moentwine_4x8x8"
    yield (
        claim,
        {
            OVERLAP: Found(100 * (speed[rack] / best - 1)),
            ADD: Found(100 * (times["add"][cluster] / times["add"][rack] - 1)),
        },
    )
    claim = Claim("wafers over NVL72, %", "III-A and VI-D: 39 %", 39, 39, POINTS, "points")
    whole = {row["balancer"] + row["machine"]: row for row in select(machines, phase="prefill")}
    before = _slower(whole["topology_awareNVL72"]) / _slower(whole["topology_awarewafers, 1 TB/s a link"])
    wide = _slower(whole["topology_awareNVL72"]) / _slower(whole["topology_awarewafers, 4 TB/s a link"])
    yield (
        claim,
        {
            OVERLAP: Found(100 * (before - 1)),
            ADD: Found(100 * (times["add"][rack] / times["add"][wafers] - 1)),
            f"{OVERLAP}, 4 TB/s a link": Found(100 * (wide - 1)),
        },
    )
    claim = Claim("balancing NVL72, experts, %", "VI-D: restricting gains to just 26 %", 26, 26, POINTS, "points")
    yield (
        claim,
        {
            reading: Found(
                mean(_saved_by_balancing(select(adding, phase=phase, memory_and_products=reading, machine=rack)))
            )
            for phase, reading in (("decode", OVERLAP), ("decode", ADD))
        },
    )
    claim = Claim("all-to-all over experts beyond four nodes", "I: by 2.3x", 2.3, 2.3, WITHIN)
    nodes = next(row for row in sent if row["machine"] == "dgx_b200_8x8")
    ratio = float(nodes["all_to_all_us"]) / few["dgx_b200_8x8"]
    added = float(nodes["all_to_all_us"]) / _experts(rows, "64", "add")["dgx_b200_8x8"]
    yield claim, {OVERLAP: Found(ratio), ADD: Found(added)}


def _experts(rows: Rows, tokens: str, reading: str) -> dict[str, float]:
    """Microseconds of experts by machine, so many tokens in a group of four devices."""
    own = select(rows, tokens=tokens, rule="eq_1", memory_and_products=reading)
    return {row["machine"]: float(row["experts_us"]) for row in own}


def _slower(row: dict[str, str]) -> float:
    return max(float(row["compute_us"]), float(row["all_to_all_us"]))


def _saved_by_balancing(rows: Rows) -> Iterator[float]:
    """Per cent of experts' time without a balancer, by the topology-aware one."""
    by = {row["balancer"]: float(row["compute_us"]) for row in rows}
    yield 100 * (1 - by["topology_aware"] / by["none"])


def balancers(rows: Rows, loads: Rows) -> Claims:
    """VI-C, EP 256 and mixed scenarios: one baseline a row."""
    own = {
        (row["phase"], row["balancer"], row["migration"], row["trigger"]): row for row in select(rows, devices="256")
    }

    def of(phase: str, balancer: str) -> dict[str, str]:
        kept = (balancer, "invasive", "never" if balancer == "none" else "every_ten")
        return own[phase, *kept]

    def everywhere(value: float) -> dict[str, Found]:
        return {OVERLAP: Found(value), ADD: Found(value)}

    for balancer, paper in (("none", 2.0), ("greedy", 0.4)):
        claim = Claim(f"excess, {balancer}", "VI-C1: by 2x, approximately 0.4x", paper, paper, WITHIN)
        yield claim, everywhere(float(of("decode", balancer)["excess"]))
    for baseline in ("eplb", "greedy"):
        for phase, paper in (("prefill", 22.0), ("decode", 45.0)):
            claim = Claim(f"migration of {baseline}, % of {phase}", "VI-C2", paper, paper, 5.0, "points")
            yield claim, everywhere(100 * float(of(phase, baseline)["migration_share"]))
        moved = [
            float(of(phase, baseline)["migration_us"]) / float(of(phase, "topology_aware")["migration_us"])
            for phase in ("prefill", "decode")
        ]
        claim = Claim(f"migration of {baseline} over topology-aware", "VI-C2: by 2.6x on average", 2.6, 2.6, WITHIN)
        yield claim, everywhere(mean(moved))
        claim = Claim(f"a migration of {baseline} in iterations", "VI-C1: equivalent to 2", 2.0, 2.0, WITHIN)
        yield (
            claim,
            everywhere(mean(float(of(p, baseline)["migration_costs_iterations"]) for p in ("prefill", "decode"))),
        )
    for part, paper, sentence in (
        ("compute_us", 54.0, "VI-C2: up to 54 %"),
        ("all_to_all_us", 23.0, "VI-C2: by 23 % on average"),
    ):
        saved = [
            100
            * (1 - float(own[phase, "topology_aware", "non_invasive", "always"][part]) / float(of(phase, "none")[part]))
            for phase in ("prefill", "decode")
        ]
        value = max(saved) if part == "compute_us" else mean(saved)
        yield Claim(f"{part[:-3]} saved by balancing, %", sentence, paper, paper, POINTS, "points"), everywhere(value)
    peak = max(float(row["largest_peak"]) for row in loads if row["source"] == "preset qwen3-235b-a22b")
    yield Claim("peak of 8 devices over their mean", "V-B, Fig. 12: 2.9x", 2.9, 2.9, WITHIN), everywhere(peak)


def parts(rows: Rows) -> Claims:
    """VI-D, Fig. 17, in prefill: what each step saves of a part, %."""
    own = {row["step"]: row for row in select(rows, phase="prefill")}
    for name, part, new, old, paper in (
        ("all-to-all, ER over baseline", "all_to_all_us", "ER", "wafers", 30.0),
        ("all-to-all, HER over baseline", "all_to_all_us", "HER", "wafers", 71.0),
        ("all-to-all, HER over ER", "all_to_all_us", "HER", "ER", 100 * (1 - 0.29 / 0.70)),
        ("experts, balancing", "compute_us", "HER, non-invasive", "HER", 49.0),
        ("all-to-all, balancing", "all_to_all_us", "HER, non-invasive", "HER", 20.0),
        ("migration, topology-aware over greedy", "migration_us", "HER, topology-aware", "HER, greedy", 67.0),
        ("migration, non-invasive", "migration_us", "HER, non-invasive", "HER, greedy", 100.0),
    ):
        value = Found(100 * (1 - float(own[new][part]) / float(own[old][part])))
        yield Claim(f"{name}, % saved", "VI-D, Fig. 17", paper, paper, POINTS, "points"), {OVERLAP: value, ADD: value}


def sharing(rows: Rows) -> Claims:
    """I: "E/D ratios below one, which further boosts EP performance up to 59 %": EPLB's copies in prefill."""
    own = select(rows, phase="prefill", shadow_slots="0")
    time = {row["devices"]: float(row["compute_us"]) for row in own}
    value = Found(100 * max(time["256"] / time[devices] - 1 for devices in ("384", "512")))
    yield Claim("E/D below one, %", "I: up to 59 %", 59, 59, POINTS, "points"), {OVERLAP: value, ADD: value}
