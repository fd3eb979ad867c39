"""moentwine's mapping: geometry, communication (Fig. 6, 13, 14), Fig. 1a and 4, links, sensitivities, agreement.

python studies/moentwine/study.py                all tables, in some minutes
python studies/moentwine/study.py sensitivity    one of them, ten seconds of a core
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from cases import MODELS, STAGES, TOKENS, Case, best_fetch, gain, layout_of, microseconds, total
from verdicts import verdict_rows

from jaxmoe.experiment.table import earlier_table, make_tables, study_options, tables_of
from jaxmoe.files import read_table

HERE = Path(__file__).parent
RULES = ("eq_1", "congestion")
WAFERS = {"moentwine_4x4": (2, 4, 8), "moentwine_6x6": (2, 3, 4, 6, 9, 12, 18), "moentwine_8x8": (2, 4, 8, 16, 32)}
Row = dict[str, object]


def _line(figure: str, case: Case) -> Row:
    """A case as a line of the table of communication."""
    case = best_fetch(case)
    times = microseconds(case)
    known = {name: getattr(case, name) for name in ("machine", "layout", "model", "tp", "tokens", "fetch", "rule")}
    gather = "" if case.all_gather is None else case.all_gather
    numbers = {"link_GB_per_s": case.link_GB_per_s or "", "latency_ns": case.latency_ns}
    return {"figure": figure, **known, "all_gather": gather, **numbers} | {
        f"{name}_us": times[name] for name in (*STAGES, "closing", "total")
    }


def _three(figure: str, wafer: str, cluster: str, **common: object) -> Iterator[Row]:
    """DGX, the wafer and the wafer with entwined rings."""
    for rule in RULES:
        yield _line(figure, Case(cluster, "successive", rule=rule, **common))
        for layout in ("baseline", "er"):
            yield _line(figure, Case(wafer, layout, rule=rule, **common))


def communication() -> Iterator[Row]:
    """Line 2: Fig. 6, 13 and 14."""
    for machine, rule in itertools.product((*WAFERS, "moentwine_4x8x8"), RULES):
        for tokens, latency in ((TOKENS_DECODE, 200.0), (TOKENS_PREFILL, 200.0)):
            case = Case(machine, "baseline", "deepseek-v3", tokens=tokens, latency_ns=latency, rule=rule)
            yield _line("6", case)
    for tokens in (16, 32, 64, 128, 256, 512, 1024, 2048):
        for wafer, cluster in PAIRS:
            for latency in (0.0, 200.0):
                yield from _three("13a", wafer, cluster, model="deepseek-v3", tokens=tokens, latency_ns=latency)
    for model in MODELS:
        yield from _three("13b", *PAIRS[0], model=model)
    for machine, degrees in WAFERS.items():
        for tp, layout, rule in itertools.product(degrees, ("baseline", "er"), RULES):
            yield _line("13c", Case(machine, layout, tp=tp, rule=rule))
    for tp, rule in itertools.product((2, 4, 8, 16, 32), RULES):
        for layout in ("baseline", "er", "her", "her_blocks"):
            yield _line("13d", Case("moentwine_4x8x8", layout, tp=tp, rule=rule))
    for model, rule in itertools.product(("dbrx", "mixtral-8x22b"), RULES):
        yield _line("14a", Case("dgx_b200_4x8", "successive", model, fetch="sliced", rule=rule))
        for layout in ("baseline_esp", "esp"):
            yield _line("14a", Case("moentwine_6x6", layout, model, rule=rule))
    for model, rule, layout, gather in itertools.product(MODELS, RULES, ("baseline", "er"), (False, True)):
        yield _line("14b", Case("moentwine_6x6", layout, model, all_gather=gather, rule=rule))


PAIRS = (("moentwine_6x6", "dgx_b200_4x8"), ("moentwine_8x8", "dgx_b200_8x8"))
TOKENS_DECODE, TOKENS_PREFILL = 64, 2048


def performance() -> Iterator[Row]:
    """Fig. 1a and 4: experts and their all-to-all on ever more devices, with as many tokens on each (DeepSeek-V3).

    Experts read their INT8 weights and multiply at twice the FP16 rate. Dies overlap both, and the longer counts, or
    they add up. The layer takes what is longer, experts or all-to-all (Fig. 1a), each machine at its own best layout.
    """
    model = "deepseek-v3"
    experts, size, chosen = MODELS[model].experts, 3 * MODELS[model].hidden * 2048, MODELS[model].top_k
    for tokens, rule, overlap in itertools.product((32, 64, TOKENS, 512, 944, 1024, 2240, 4096), RULES, (True, False)):
        for machine, layouts in EXPERT_PARALLEL.items():
            devices = layout_of(Case(machine, layouts[0])).num_nodes
            here = experts / devices
            memory = max(here, 1.0) * size / 8e12  # a device that shares an expert's tokens has all of its weights
            products = 2 * size * (tokens / 4) * chosen / 4500e12
            cases = [best_fetch(Case(machine, layout, model, tokens=tokens, rule=rule)) for layout in layouts]
            sent = {case.layout: sum(microseconds(case)[name] for name in ("dispatch", "combine")) for case in cases}
            best = min(sent, key=lambda layout: sent[layout])
            compute = 1e6 * (max(memory, products) if overlap else memory + products)
            seconds = max(compute, sent[best])
            yield {
                "tokens": tokens,
                "rule": rule,
                "memory_and_products": "overlap" if overlap else "add",
                "machine": machine,
                "devices": devices,
                "experts_per_device": here,
                "layout": best,
                "memory_us": 1e6 * memory,
                "products_us": 1e6 * products,
                "experts_us": compute,
                "all_to_all_us": sent[best],
                "all_to_all_over_compute": sent[best] / compute,
                "tokens_per_us_and_device": tokens / 4 / seconds,
            }


EXPERT_PARALLEL = {
    "dgx_b200_4x8:clusters=1": ("successive",),
    "dgx_b200_4x8:clusters=2": ("successive",),
    "dgx_b200_4x8": ("successive",),
    "dgx_b200_8x8": ("successive",),
    "nvl72": ("successive",),
    "moentwine_4x4": ("baseline", "er"),
    "moentwine_6x6": ("baseline", "er"),
    "moentwine_8x8": ("baseline", "er"),
    "moentwine_4x8x8": ("baseline", "er", "her"),
    "moentwine_4x8x8:grid=[2, 3]": ("baseline", "er", "her"),
}


def sensitivity() -> Iterator[Row]:
    """What 8 TB/s may mean for a link, hop latency, one-way rings, and what the closing all-reduce takes back."""
    (wafer, cluster), models = PAIRS[0], tuple(MODELS)
    for link, latency, both_ways, rule in itertools.product(
        (1000.0, 2000.0, 4000.0, 8000.0), (0.0, 200.0), (True, False), RULES
    ):
        gains: dict[str, list[float]] = {"wsc": [], "er": [], "er_wsc": [], "closed": []}
        for model in models:
            common = {
                "model": model,
                "rule": rule,
                "link_GB_per_s": link,
                "latency_ns": latency,
                "both_ways": both_ways,
            }
            dgx = total(Case(cluster, "successive", model))
            cases = [best_fetch(Case(wafer, layout, **common)) for layout in ("baseline", "er")]
            base, er = (microseconds(case) for case in cases)
            gains["wsc"].append(gain(base["total"], dgx))
            gains["er"].append(gain(er["total"], dgx))
            gains["er_wsc"].append(gain(er["total"], base["total"]))
            gains["closed"].append(gain(er["total"] + er["closing"], base["total"] + base["closing"]))
        yield {
            "link_GB_per_s": link,
            "latency_ns": latency,
            "rings": "both ways" if both_ways else "one way",
            "rule": rule,
            **{f"{name}_gain_mean": float(np.mean(values)) for name, values in gains.items()},
            "er_wsc_gain_max": max(gains["er_wsc"]),
        }


def slices() -> Iterator[Row]:
    """Fig. 14a by how experts are sliced, TP, and all-to-alls counted: two, or the one that VI-B5 names, to gather."""
    for model, tp, rule in itertools.product(("dbrx", "mixtral-8x22b"), (2, 4, 6, 9), RULES):
        times = {}
        for layout in ("esp", "baseline_esp", "domain_esp", "group_esp"):
            case = best_fetch(Case("moentwine_6x6", layout, model, tp=tp, rule=rule))
            times[layout] = microseconds(case)
            known = {"model": model, "tp": tp, "rule": rule, "layout": layout, "fetch": case.fetch}
            two = times[layout]["total"]
            told = {"all_reduce_us": times[layout]["all_reduce"], "fetch_us": times[layout]["fetch"], "total_us": two}
            one = two - times[layout]["fetch"]
            entwined = times["esp"]
            told |= {"er_gain": gain(entwined["total"], two)}
            told |= {"er_gain_one_all_to_all": gain(entwined["total"] - entwined["fetch"], one)}
            yield known | told


# The claims: what the paper says, and what the tables above say of it.


def _wider(rows: list[Row], by: float) -> list[Row]:
    """The rows with wafers' links and borders so many times as wide: without latency all their times shrink alike."""
    return [
        row | {name: float(str(row[name])) / by for name in ("total_us", "closing_us")}
        if str(row["machine"]).startswith("moentwine") and float(str(row["latency_ns"])) == 0
        else row
        for row in rows
    ]


def _gains(rows: list[Row], figure: str, new: str, old: str, rule: str, *keys: str, **fixed: object) -> np.ndarray:
    """Gains of a layout over another in all cases of a figure that are alike in `keys`."""
    chosen = [row for row in rows if row["figure"] == figure and row["rule"] == rule]
    chosen = [row for row in chosen if all(str(row[key]) == str(value) for key, value in fixed.items())]
    time = {(row["layout"], *(row[key] for key in keys)): float(str(row["total_us"])) for row in chosen}
    cases = [case[1:] for case in time if case[0] == new]
    return np.array([gain(time[(new, *case)], time[(old, *case)]) for case in cases])


def claims(folder: Path) -> Iterator[Row]:
    """Line 2, claim by claim, in per cent; `within` are the points that were set before the run, or a floor.

    Beside them what wafers come to with four times the bandwidth: "4 TB/s intra-wafer bandwidth between dies" (I).
    """
    rows: list[Row] = [dict(row) for row in read_table(folder / "communication.csv")]
    for own, wide in zip(_lines(rows), _lines(_wider(rows, 4.0)), strict=True):
        yield own | {f"{rule}_wide_%": wide[f"{rule}_%"] for rule in RULES}


def _lines(rows: list[Row]) -> Iterator[Row]:
    """The claims from rows of communication."""

    def gains(figure: str, new: str, old: str, *keys: str, **fixed: object) -> Callable[[str], np.ndarray]:
        return lambda rule: _gains(rows, figure, new, old, rule, *keys, **fixed)

    def line(claim: str, paper: float, value: Callable[[str], float], within: float | None = 15) -> Row:
        told = {rule: 100 * value(rule) for rule in RULES}
        holds = {rule: told[rule] >= paper if within is None else abs(told[rule] - paper) <= within for rule in RULES}
        row: Row = {"claim": claim, "paper_%": paper, "within_points": "at least" if within is None else within}
        return row | {f"{rule}_%": told[rule] for rule in RULES} | {f"{rule}_holds": holds[rule] for rule in RULES}

    wsc, er = gains("13b", "baseline", "successive", "model"), gains("13b", "er", "baseline", "model")
    yield line("13a: WSC over DGX from 256 tokens", 54, lambda rule: _beyond(rows, rule, "baseline"))
    yield line("13a: ER over DGX from 256 tokens", 73, lambda rule: _beyond(rows, rule, "er"))
    yield line("13b: WSC over DGX, mean", 56, lambda rule: wsc(rule).mean())
    yield line("13b: ER over baseline, most", 35, lambda rule: er(rule).max())
    little = gains("13b", "er", "baseline", "model", model="mixtral-8x22b")
    yield line("13b: ER over baseline, Mixtral", 0, lambda rule: little(rule)[0])
    scales, several = gains("13c", "er", "baseline", "machine", "tp"), gains("13d", "her", "baseline", "tp")
    yield line("13c: ER over baseline, most", 46, lambda rule: scales(rule).max())
    yield line("13c: ER over baseline, least", 0, lambda rule: scales(rule).min(), None)
    yield line("13d: HER over baseline, most", 62, lambda rule: several(rule).max())
    yield line("13d: HER over baseline, least", 0, lambda rule: several(rule).min(), None)
    sliced, entwined = gains("14a", "baseline_esp", "successive", "model"), gains("14a", "esp", "baseline_esp", "model")
    yield line("14a: WSC over DGX, sliced, mean", 50, lambda rule: sliced(rule).mean())
    yield line("14a: ER over baseline, sliced, mean", 9, lambda rule: entwined(rule).mean(), 5)
    for layout in ("baseline", "er"):
        for closing, named in ((False, ""), (True, ", closing too")):
            value = lambda rule, name=layout, closing=closing: _gather_gain(rows, rule, name, closing)  # noqa: E731
            yield line(f"14b: all-gather, {layout}{named}, mean", 17, value, 5)


def _beyond(rows: list[Row], rule: str, layout: str) -> float:
    """Mean gain over the clusters at 256 tokens and more, both pairs of machines, without hop latency."""
    chosen = [
        row for row in rows if row["figure"] == "13a" and row["rule"] == rule and float(str(row["latency_ns"])) == 0
    ]
    gains = []
    for wafer, cluster in PAIRS:
        time = {(row["machine"], row["layout"], int(str(row["tokens"]))): float(str(row["total_us"])) for row in chosen}
        sizes = sorted({tokens for machine, _, tokens in time if machine == wafer and tokens >= 256})
        gains += [gain(time[wafer, layout, size], time[cluster, "successive", size]) for size in sizes]
    return float(np.mean(gains))


def _gather_gain(rows: list[Row], rule: str, layout: str, closing: bool) -> float:
    """Mean over models of what the all-gather saves, with the closing all-reduce or without."""
    chosen = [row for row in rows if row["figure"] == "14b" and row["rule"] == rule and row["layout"] == layout]
    time = {
        (row["model"], row["all_gather"]): float(str(row["total_us"])) + closing * float(str(row["closing_us"]))
        for row in chosen
    }
    return float(np.mean([gain(time[model, "True"], time[model, "False"]) for model in MODELS]))


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "communication": communication,
    "performance": performance,
    "sensitivity": sensitivity,
    "slices": slices,
}


if __name__ == "__main__":
    given = study_options(__doc__).parse_args()
    made = TABLES | {"claims": partial(claims, earlier_table(HERE, given, "communication").parent)}
    made |= {"verdicts": partial(verdict_rows, HERE)}
    make_tables(HERE, tables_of(made, digits=6), given)
