"""Every claim of the paper beside what the tables have, under the readings before and now, in seconds.

`python studies/wafer_gpu/claims.py` writes `claims.csv` from the other tables and prints the count of each reading.
"""

from collections.abc import Callable, Iterator, Mapping
from statistics import mean

from gains import (
    EXPERTS,
    FOLDER,
    LARGE,
    MACHINES,
    MODELS,
    Rows,
    bound_by_compute,
    busiest,
    gains,
    key,
    overheads,
    read,
    saved,
    select,
)

from jaxmoe.experiment.claims import Claim, Finding, claims_script

BEFORE, FITTED, NOW = "blocks, in a stream", "three dies, in a stream", "whole experts, in turn"
BUSY = f"{NOW}, where compute binds"  # "shifts the bottleneck to workload distribution", V-D
ALL = f"{NOW}, a row predicts all experts"
CITED = "configurations that are cited alone"
CITED_MACHINES = ("h100_sxm_8", "h800_8")  # of the caption's [16] and [36]; what [17] is the text does not say
FULL_RATE = "weights at the full rate of HBM"
WITHIN = 0.2  # of a figure, or of the nearer end of a range
Figure = Callable[[Rows, str, str], float]  # of rows, and what base and `pred` are called in them
Claims = Iterator[tuple[Claim, Mapping[str, Finding]]]


def tables() -> dict[str, tuple[Rows, str, str]]:
    """Rows of each reading, and what base and `pred` are called there."""
    plain = [row for row in read("throughput") if row["machine"] in MACHINES and row["batch"] in LARGE]
    turns = select(read("readings"), seed="0", steps="all", outstanding="1", switching="store_and_forward")
    whole = [row for row in turns if row["model"] in MODELS]
    return {
        BEFORE: (plain, "base", "pred"),
        FITTED: (plain, "base, 3 dies", "pred, 3 dies"),
        NOW: (whole, "base", "pred"),
        ALL: (_all_predicted(whole), "base", "pred"),
    }


def _all_predicted(rows: Rows) -> Rows:
    """Rows of which copies come from maps that predict, of each expert, all that ever followed it."""
    copying = [row for row in read("tops") if row["top"] == str(EXPERTS[row["model"]][0])]
    others = {row["policy"] for row in copying}
    return [*(row for row in rows if row["policy"] not in others), *copying]


def both_over_base() -> Claims:
    """V-C."""
    told = {name: published for name, (published, _) in (MODELS | MACHINES).items()}
    for name, published in told.items():
        part = "model" if name in MODELS else "machine"
        claim = Claim(f"allo+pred over base, {name}", "V-C", published, published, WITHIN)
        yield claim, _each(_gain_of(part, name), fitted=True)
    claim = Claim("average speed-up", "I: an average 4.0x-6.3x speedup", 4.0, 6.3, WITHIN)
    yield claim, _each(lambda rows, base, _: mean(gains(rows, "allo+pred", base)), fitted=True)
    for first, second, sentence in (
        (*MODELS, "V-C: greater improvement due to its larger number of experts"),
        (*reversed(MACHINES), "V-C: due to its rectangular layout"),
    ):
        claim = Claim(f"{first} gains more than {second}", sentence, 1.0, None, 0.0)
        part = "model" if first in MODELS else "machine"
        yield claim, _each(_ratio_of(part, first, second), fitted=True)


def _gain_of(part: str, name: str) -> Figure:
    return lambda rows, base, _: mean(gains(select(rows, **{part: name}), "allo+pred", base))


def _ratio_of(part: str, first: str, second: str) -> Figure:
    one, two = _gain_of(part, first), _gain_of(part, second)
    return lambda *known: one(*known) / two(*known)


def _each(value: Figure, fitted: bool = False) -> dict[str, Finding]:
    """A figure under every reading; three dies were `fitted` to what both gain over base."""
    return {
        reading: Finding(value(rows, base, pred), fitted=fitted and reading == FITTED)
        for reading, (rows, base, pred) in tables().items()
    }


def hops_and_copies() -> Claims:
    """V-D and V-E."""
    yield (
        Claim("pred over base", "V-D: aligning with performance results", 3.7, 4.4, WITHIN),
        _each(lambda rows, base, pred: mean(gains(rows, pred, base))),
    )
    yield Claim("hops saved by pred", "V-D", 3.7, 4.4, WITHIN), _hops(lambda rows, base, pred: saved(rows, pred, base))
    by_allo = _hops(lambda rows, base, _: saved(rows, "allo", base))
    yield Claim("hops saved by allo", "V-D", 7.2, 10.8, WITHIN), by_allo
    yield Claim("hops saved by allo, the wider range", "V-D: 17x-661x", 17.0, 661.0, WITHIN), by_allo
    yield (
        Claim("hops saved by allo+pred", "V-D", 210.0, 944.0, WITHIN),
        _hops(lambda rows, base, _: saved(rows, "allo+pred", base)),
    )
    yield (
        Claim("hops of allo over allo+pred", "V-D: 10x improvement", 10.0, 10.0, WITHIN),
        _hops(lambda rows, *_: saved(rows, "allo+pred", "allo")),
    )
    yield (
        Claim("time of allo over allo+pred", "V-D: 1.2x average", 1.2, 1.2, 0.1),
        _each(lambda rows, *_: mean(gains(rows, "allo+pred", "allo"))),
    )
    claim = Claim("base reads remotely, part of all", "V-E: most reads in the baseline", 0.5, None, 0.0)
    yield claim, _each(lambda rows, base, _: _remote(rows, base))
    claim = Claim("allo+pred reads locally, part of all", "V-E: most are converted to local reads", 0.5, None, 0.0)
    yield claim, _each(lambda rows, *_: 1 - _remote(rows, "allo+pred"))


def _hops(value: Figure) -> dict[str, Finding]:
    """A figure under every reading, and of the cases in turn where compute is busiest on dies under `allo`."""
    rows, *names = tables()[NOW]
    cases = {key(row) for row in select(read("throughput"), policy="allo") if busiest(row) == "compute_us"}
    return _each(value) | {BUSY: Finding(value([row for row in rows if key(row) in cases], *names))}


def _remote(rows: Rows, policy: str) -> float:
    remote, local = (
        sum(float(row[key]) for row in select(rows, policy=policy)) for key in ("remote_read", "local_read")
    )
    return remote / (remote + local)


def later_edition() -> Claims:
    """The later edition's dies and figures, on which nothing was chosen."""
    stream = read("later")
    turns = [row for row in read("readings") if row["model"].endswith("FP16")]
    turns = [row | {"model": row["model"].removesuffix(", FP16")} for row in turns]
    tried = {BEFORE: (stream, "base"), FITTED: (stream, "base, 3 dies"), NOW: (turns, "base")}
    for name, (_, published) in (MODELS | MACHINES).items():
        part = "model" if name in MODELS else "machine"
        claim = Claim(f"later edition: allo+pred over base, {name}", "V-C, v4", published, published, WITHIN)
        found = {
            reading: mean(gains(select(rows, **{part: name}), "allo+pred", base)) if rows else None
            for reading, (rows, base) in tried.items()
        }
        yield claim, {reading: Finding(value, because="its rows are not made") for reading, value in found.items()}
    for policy, published in (("pred", 4.5), ("allo", 142.0), ("allo+pred", 213.0)):
        claim = Claim(f"later edition: hops saved by {policy}", "V-D, v4", published, published, WITHIN)
        yield (
            claim,
            {
                reading: Finding(saved(rows, policy, base) if rows else None, because="its rows are not made")
                for reading, (rows, base) in tried.items()
                if reading != FITTED
            },
        )
    claim = Claim("later edition: allo+pred over expert parallelism at 16,384", "v4", 1.44, 1.44, WITHIN)
    large = {reading: select(tried[reading][0], batch="16384") for reading in (BEFORE, NOW)}
    yield (
        claim,
        {
            reading: Finding(mean(gains(rows, "allo+pred", "home")) if rows else None, because="its rows are not made")
            for reading, rows in large.items()
        },
    )


def host() -> Claims:
    """V-F, of a stream: before over all batches, now over those where compute binds, as the paper's ratio has it.

    A fixed cost is fitted on DeepSeek-V3 on Dojo each time.
    """
    rows = read("host")
    tried = {BEFORE: overheads(rows), NOW: overheads(bound_by_compute(rows))}
    for model, machine in tried[NOW]:
        (first, *_) = select(rows, model=model, machine=machine)
        fitted = first["fitted"] == "True"
        least, most = (float(first[f"published_{end}"]) for end in ("least", "most"))
        claim = Claim(f"host's overhead in %, {model} on {machine}", "V-F", least, most, WITHIN)
        yield claim, {reading: Finding(found[model, machine], fitted=fitted) for reading, found in tried.items()}
    claim = Claim("host's overhead, Dojo-Enhanced over Dojo", "V-F: over 3.7x", 3.7, None, 0.0)
    ratios = {
        reading: min(found[model, "dojo_enhanced_5x5"] / found[model, "dojo_5x5"] for model in MODELS)
        for reading, found in tried.items()
    }
    yield claim, {reading: Finding(ratio) for reading, ratio in ratios.items()}


def movement() -> Claims:
    """Fig. 2 and the introduction: what MoE moves, of the time of a decode step; experts count as their weights."""
    rows = read("breakdown")
    large, small = (select(rows, model=model) for model in ("deepseek-v3", "mixtral-8x7b"))
    (ours, lower), (others, low) = ([_moved(own, part) for part in ("experts", "weights")] for own in (large, small))
    cited = _moved([row for row in large if row["machine"] in CITED_MACHINES], "experts")
    sentence = "II-B, Fig. 2: 60%-90% of total latency"
    claim = Claim("movement of MoE, % of latency, least of DeepSeek-V3's", sentence, 60.0, 90.0, WITHIN)
    none = Finding(None, because="its serving configurations are not stated")
    yield claim, {BEFORE: none, NOW: Finding(min(ours)), CITED: Finding(min(cited)), FULL_RATE: Finding(min(lower))}
    claim = Claim("movement of MoE, % of latency, most of DeepSeek-V3's", sentence, 60.0, 90.0, WITHIN)
    yield claim, {NOW: Finding(max(ours)), CITED: Finding(max(cited)), FULL_RATE: Finding(max(lower))}
    sentence = "I: exceeds 50% for small models (e.g., Mixtral 8x7B) on 2-4 GPUs"
    claim = Claim("movement of MoE, % of latency, least of Mixtral-8x7B's", sentence, 50.0, None, 0.0)
    yield claim, {NOW: Finding(min(others)), FULL_RATE: Finding(min(low))}
    sentence = "I: exacerbates further with DeepSeek V3 on 32+ GPUs"
    claim = Claim("movement of MoE, DeepSeek-V3 on 32 GPUs and more over Mixtral-8x7B", sentence, 1.0, None, 0.0)
    many = [row for row in large if int(row["gpus"]) >= 32]
    parts = {NOW: "experts", FULL_RATE: "weights"}
    ratio = {reading: mean(_moved(many, part)) / mean(_moved(small, part)) for reading, part in parts.items()}
    yield claim, {reading: Finding(found) for reading, found in ratio.items()}


def _moved(rows: Rows, weights: str) -> list[float]:
    """All-to-all and what counts as weights, % of a step."""
    return [float(row["all_to_all_percent"]) + float(row[f"{weights}_percent"]) for row in rows]


def not_attempted() -> Claims:
    claim = Claim("simulator's error in %", "V-B, Fig. 12", 0.0, 5.0, 0.0)
    none = Finding(None, because="the paper prints no measured times")
    yield claim, {BEFORE: none, NOW: none}


PARTS = (both_over_base, hops_and_copies, later_edition, host, movement, not_attempted)

if __name__ == "__main__":
    claims_script(__doc__, FOLDER, PARTS)
