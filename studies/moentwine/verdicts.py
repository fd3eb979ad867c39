"""Claims of the paper beside what the tables have, a verdict each: verdicts.csv, made by study.py and counted here.

Readings: memory and products of a die overlap, as before, or add up; links have 1 TB/s each way, or 4 TB/s ("4 TB/s
intra-wafer bandwidth between dies", I); groups of Fig. 17 have four devices, or two. Communication is by Eq. 1; its
figures under congestion are in claims.csv.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

from jaxmoe.experiment.claims import Claim, Finding, claim_rows, counts_of
from jaxmoe.experiment.table import script_options
from jaxmoe.files import read_table

OVERLAP, ADD, WIDE, ALONE = "overlap", "add", "add, 4 TB/s a link", "overlap, experts alone"
PAIRS, PAIRS_EQ_1 = "groups of two", "groups of two, Eq. 1"  # VI-D does not state TP; elsewhere it is 4
RULES = (OVERLAP, ADD)
WITHIN, POINTS = 0.2, 15.0  # of a figure; points of per cent, those of claims.csv
Rows = list[dict[str, str]]
Claims = Iterator[tuple[Claim, Mapping[str, Finding]]]


def select(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def verdict_rows(folder: Path) -> Iterator[dict[str, object]]:
    """All claims from the tables of a folder."""

    def read(name: str) -> Rows:
        return read_table(folder / f"{name}.csv")

    yield from claim_rows(communication(read("claims")))
    yield from claim_rows(performance(read("performance"), read("balancing_adding"), read("balancing_machines")))
    yield from claim_rows(balancers(read("balancing_balance"), read("balancing_loads"), read("balancing_adding")))
    mapped = (read("balancing_groups"), read("communication"))
    yield from claim_rows(parts(read("balancing_parts"), read("balancing_adding"), *mapped))
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
        own = Finding(float(row["eq_1_%"]), fitted="over DGX" in row["claim"])
        yield claim, {OVERLAP: own, ADD: own, WIDE: Finding(float(row["eq_1_wide_%"]))}


def performance(rows: Rows, adding: Rows, machines: Rows) -> Claims:
    """I, III-A and VI-D: experts of DeepSeek-V3.

    Before, Fig. 4 was read with 64 tokens of a group and each machine's all-to-all. Now it is of experts alone, at the
    tokens that the balancers have in prefill: by the longer of memory and products, or by the sum.
    """
    rack, cluster, wafers = "nvl72", "dgx_b200_4x8", "moentwine_4x8x8"
    few, many = "64", "1024"
    speed = {row["machine"]: float(row["tokens_per_us_and_device"]) for row in _balanced(rows, few, OVERLAP)}
    best = max(rate for machine, rate in speed.items() if machine.startswith("dgx"))
    experts = {
        name: {row["machine"]: float(row["experts_us"]) for row in _balanced(rows, many, name)} for name in RULES
    }
    for name, sentence, ends, new, old, before in (
        ("NVL72 over DGX, %", "I and III-A: by 37 %, a 35 % gain", (35, 37), rack, cluster, speed[rack] / best),
        ("wafers over NVL72, %", "III-A: a further 39 %", (39, 39), wafers, rack, speed[wafers] / speed[rack]),
    ):
        claim = Claim(name, sentence, *ends, POINTS, "points")
        found = {OVERLAP: before, ALONE: experts[OVERLAP][old] / experts[OVERLAP][new]}
        found |= {ADD: experts[ADD][old] / experts[ADD][new]}
        yield claim, {reading: Finding(100 * (ratio - 1)) for reading, ratio in found.items()}
    claim = Claim("wafers over NVL72, balanced, %", "VI-D: an average 39 %", 39, 39, POINTS, "points")
    yield claim, {reading: Finding(value) for reading, value in _over_the_rack(adding, machines).items()}
    for phase in ("prefill", "decode"):
        claim = Claim(f"balancing NVL72, experts, {phase}, %", "VI-D: just 26 %", 26, 26, POINTS, "points")
        yield claim, {reading: Finding(_experts_saved(adding, rack, phase, reading)) for reading in RULES}
    claim = Claim("all-to-all over experts beyond four nodes", "I: by 2.3x", 2.3, 2.3, WITHIN)
    nodes = {name: select(_balanced(rows, few, name), machine="dgx_b200_8x8")[0] for name in RULES}
    yield claim, {name: Finding(float(row["all_to_all_us"]) / float(row["experts_us"])) for name, row in nodes.items()}


def _balanced(rows: Rows, tokens: str, rule: str) -> Rows:
    """Rows of balanced gating, so many tokens in a group of four devices."""
    return select(rows, tokens=tokens, rule="eq_1", memory_and_products=rule)


def _over_the_rack(adding: Rows, machines: Rows) -> dict[str, float]:
    """Per cent in prefill by which wafers are faster than NVL72: the longer of experts and all-to-all, skewed loads."""
    told = {row["machine"]: row for row in select(machines, phase="prefill", balancer="topology_aware")}
    added = select(adding, phase="prefill", balancer="topology_aware", memory_and_products=ADD)
    ours = {row["machine"]: row for row in added}
    rack, wafers = ours["nvl72"], ours["moentwine_4x8x8"]
    wide = wafers | {"all_to_all_us": str(float(wafers["all_to_all_us"]) / 4)}
    pairs = {
        OVERLAP: (told["NVL72"], told["wafers, 1 TB/s a link"]),
        f"{OVERLAP}, 4 TB/s a link": (told["NVL72"], told["wafers, 4 TB/s a link"]),
        ADD: (rack, wafers),
        WIDE: (rack, wide),
    }
    return {reading: 100 * (_longer(old) / _longer(new) - 1) for reading, (old, new) in pairs.items()}


def _longer(row: dict[str, str]) -> float:
    return max(float(row["compute_us"]), float(row["all_to_all_us"]))


def _experts_saved(adding: Rows, machine: str, phase: str, rule: str) -> float:
    """Per cent of experts' time that the topology-aware balancer saves."""
    own = select(adding, machine=machine, phase=phase, memory_and_products=rule)
    by = {row["balancer"]: float(row["compute_us"]) for row in own}
    return 100 * (1 - by["topology_aware"] / by["none"])


def balancers(rows: Rows, loads: Rows, adding: Rows) -> Claims:
    """VI-C, EP 256 and mixed scenarios: one baseline a row."""
    own = {
        (row["phase"], row["balancer"], row["migration"], row["trigger"]): row for row in select(rows, devices="256")
    }

    def of(phase: str, balancer: str) -> dict[str, str]:
        kept = (balancer, "invasive", "never" if balancer == "none" else "every_ten")
        return own[phase, *kept]

    def everywhere(value: float) -> dict[str, Finding]:
        return {OVERLAP: Finding(value), ADD: Finding(value)}

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
    hidden = {phase: own[phase, "topology_aware", "non_invasive", "always"] for phase in ("prefill", "decode")}
    saved = {
        part: [100 * (1 - float(row[part]) / float(of(phase, "none")[part])) for phase, row in hidden.items()]
        for part in ("compute_us", "all_to_all_us")
    }
    claim = Claim("experts saved by balancing, most, %", "VI-C2: by up to 54 %", 54, 54, POINTS, "points")
    added = max(_experts_saved(adding, "moentwine_4x8x8", phase, ADD) for phase in hidden)
    yield claim, {OVERLAP: Finding(max(saved["compute_us"])), ADD: Finding(added)}
    claim = Claim("all-to-all saved by balancing, %", "VI-C2: by 23 % on average", 23, 23, POINTS, "points")
    yield claim, everywhere(mean(saved["all_to_all_us"]))
    peak = max(float(row["largest_peak"]) for row in loads if row["source"] == "preset qwen3-235b-a22b")
    yield Claim("peak of 8 devices over their mean", "V-B, Fig. 12: 2.9x", 2.9, 2.9, WITHIN), everywhere(peak)


def parts(rows: Rows, adding: Rows, groups: Rows, communication: Rows) -> Claims:
    """VI-D, Fig. 17, in prefill: what each step saves of a part, %; of mappings also with groups of two devices.

    By Eq. 1 these are of Qwen3 with even gating, whose tokens have as many choices.
    """
    own = {row["step"]: row for row in select(rows, phase="prefill")}
    pairs = {row["layout"]: float(row["all_to_all_us"]) for row in select(groups, tp="2")}
    by_hops = {
        row["layout"]: float(row["dispatch_us"]) + float(row["combine_us"])
        for row in select(communication, figure="13d", machine="moentwine_4x8x8", tp="2", rule="eq_1")
    }
    steps = {"wafers": "baseline", "ER": "er", "HER": "her"}
    for name, part, new, old, paper in (
        ("all-to-all, ER over baseline", "all_to_all_us", "ER", "wafers", 30.0),
        ("all-to-all, HER over baseline", "all_to_all_us", "HER", "wafers", 71.0),
        ("all-to-all, HER over ER", "all_to_all_us", "HER", "ER", 100 * (1 - 0.29 / 0.70)),
        ("experts, balancing", "compute_us", "HER, non-invasive", "HER", 49.0),
        ("all-to-all, balancing", "all_to_all_us", "HER, non-invasive", "HER", 20.0),
        ("migration, topology-aware over greedy", "migration_us", "HER, topology-aware", "HER, greedy", 67.0),
        ("migration, non-invasive", "migration_us", "HER, non-invasive", "HER, greedy", 100.0),
    ):
        value = 100 * (1 - float(own[new][part]) / float(own[old][part]))
        added = _experts_saved(adding, "moentwine_4x8x8", "prefill", ADD) if part == "compute_us" else value
        claim = Claim(f"{name}, % saved", "VI-D, Fig. 17", paper, paper, POINTS, "points")
        found = {OVERLAP: value, ADD: added}
        if new in steps:
            for reading, times in ((PAIRS, pairs), (PAIRS_EQ_1, by_hops)):
                found[reading] = 100 * (1 - times[steps[new]] / times[steps[old]])
        yield claim, {reading: Finding(each) for reading, each in found.items()}


def sharing(rows: Rows) -> Claims:
    """I: "E/D ratios below one, which further boosts EP performance up to 59 %": EPLB's copies in prefill."""
    own = select(rows, phase="prefill", shadow_slots="0")
    time = {row["devices"]: float(row["compute_us"]) for row in own}
    value = Finding(100 * max(time["256"] / time[devices] - 1 for devices in ("384", "512")))
    none = Finding(None, because="copies on 384 and 512 devices were run with overlap alone")
    yield Claim("E/D below one, %", "I: up to 59 %", 59, 59, POINTS, "points"), {OVERLAP: value, ADD: none}


if __name__ == "__main__":
    script_options(__doc__).parse_args()
    told = read_table(Path(__file__).parent / "verdicts.csv")
    for reading in dict.fromkeys(row["reading"] for row in told):
        print(f"{reading}:", ", ".join(f"{count} {kind}" for kind, count in counts_of(told, reading).items()))
