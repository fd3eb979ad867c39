"""Every claim of the paper beside what the tables have, under the readings before and now: claims.csv."""

from collections.abc import Callable, Iterator, Mapping
from statistics import mean

from gains import LARGE, MACHINES, MODELS, Rows, gains, read, saved, select

from jaxmoe.experiment.claims import Claim, Finding, claim_rows

BEFORE, FITTED, NOW = "blocks, in a stream", "three dies, in a stream", "whole experts, in turn"
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
    }


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
    yield Claim("hops saved by pred", "V-D", 3.7, 4.4, WITHIN), _each(lambda rows, base, pred: saved(rows, pred, base))
    yield Claim("hops saved by allo", "V-D", 7.2, 10.8, WITHIN), _each(lambda rows, base, _: saved(rows, "allo", base))
    claim = Claim("hops saved by allo, the wider range", "V-D: 17x-661x", 17, 661, WITHIN)
    yield claim, _each(lambda rows, base, _: saved(rows, "allo", base))
    yield (
        Claim("hops saved by allo+pred", "V-D", 210, 944, WITHIN),
        _each(lambda rows, base, _: saved(rows, "allo+pred", base)),
    )
    yield (
        Claim("hops of allo over allo+pred", "V-D: 10x improvement", 10, 10, WITHIN),
        _each(lambda rows, *_: saved(rows, "allo+pred", "allo")),
    )
    yield (
        Claim("time of allo over allo+pred", "V-D: 1.2x average", 1.2, 1.2, 0.1),
        _each(lambda rows, *_: mean(gains(rows, "allo+pred", "allo"))),
    )
    claim = Claim("base reads remotely, part of all", "V-E: most reads in the baseline", 0.5, None, 0.0)
    yield claim, _each(lambda rows, base, _: _remote(rows, base))
    claim = Claim("allo+pred reads locally, part of all", "V-E: most are converted to local reads", 0.5, None, 0.0)
    yield claim, _each(lambda rows, *_: 1 - _remote(rows, "allo+pred"))


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
    """V-F, with a fixed cost fitted on DeepSeek-V3 on Dojo. Its layers are those of a stream, of all batches."""
    rows = read("host")
    cases = dict.fromkeys((row["model"], row["machine"]) for row in rows)
    for model, machine in cases:
        own = select(rows, model=model, machine=machine)
        least, most = (float(own[0][f"published_{end}"]) for end in ("least", "most"))
        claim = Claim(f"host's overhead in %, {model} on {machine}", "V-F", least, most, WITHIN)
        value = mean(float(row["overhead_percent"]) for row in own)
        found = Finding(value, fitted=(model, machine) == ("DeepSeek-V3", "dojo_5x5"))
        yield claim, {BEFORE: found, NOW: found}
    claim = Claim("host's overhead, Dojo-Enhanced over Dojo", "V-F: over 3.7x", 3.7, None, 0.0)
    ratio = [
        mean(float(row["overhead_percent"]) for row in select(rows, model=model, machine="dojo_enhanced_5x5"))
        / mean(float(row["overhead_percent"]) for row in select(rows, model=model, machine="dojo_5x5"))
        for model in MODELS
    ]
    yield claim, {BEFORE: Finding(min(ratio)), NOW: Finding(min(ratio))}


def not_attempted() -> Claims:
    for name, sentence, ends, because in (
        ("simulator's error in %", "V-B, Fig. 12", (0.0, 5.0), "the paper prints no measured times"),
        ("movement of MoE, % of latency", "II-B, Fig. 2", (60.0, 90.0), "its serving configurations are not stated"),
    ):
        none = Finding(None, because=because)
        yield Claim(name, sentence, *ends, 0.0), {BEFORE: none, NOW: none}


def rows() -> Iterator[dict[str, object]]:
    """All claims, under every reading that was tried of each."""
    for part in (both_over_base, hops_and_copies, later_edition, host, not_attempted):
        yield from claim_rows(part())
