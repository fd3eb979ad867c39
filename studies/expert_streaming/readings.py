"""What paired load (A3), rule 5 (A4) and token buffering (A5) gain under readings of what the paper leaves open.

Writes `readings.csv` (layers alone, event simulator), `buffering.csv` and `threshold.csv` (100 iterations, by the
model) and `prefetch.csv` (what a forecast order is worth), or what is named:
`python studies/expert_streaming/readings.py buffering`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from agreement import CONTROL, MODELS, Drawn, costs_of, described, machine_of, tokens_of
from study import END_STEPS, HERE, ready

from jaxmoe.des.description import Memory
from jaxmoe.des.streaming import stream
from jaxmoe.des.streaming_layer import Slicing, flow_of, offloaded
from jaxmoe.experiment.table import Table, make_tables, study_options, tables_of
from jaxmoe.methods.expert_streaming.trajectories import groups_in_order, ring_of, trajectories

BASE = Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 8)
DIES, SEEDS = 4, range(4)
# What differs from the study's settings.
READINGS: dict[str, dict[str, Any]] = {
    "as in the study": {},
    "DDR pooled": {"pooled": True},
    "loaded in turn": {"in_turn": True},
    "in turn, by dies with tokens": {"in_turn": True, "everywhere": False},
    "tiles of 32": {"tile": 32.0},
    "tiles of 32, in turn": {"tile": 32.0, "in_turn": True},
    "DDR 102.4 GB/s a die": {"ddr": 102.4e9},
    "4 MB a die": {"sram": 4e6},
    # As coarse as buffers allow, which few tokens like best.
    "2 micro-slices": {"cut": 2},
    "2 micro-slices, in turn": {"cut": 2, "in_turn": True},
    # Rules 1 to 4 take one expert after the other; what is loaded ahead is line 12 of Algorithm 1, which is A3's.
    "A2 alone in turn": {"alone_in_turn": True},
    "A2 alone in turn, 2 micro-slices": {"alone_in_turn": True, "cut": 2},
    "by dies with tokens": {"everywhere": False},
    "A2 alone in turn, by dies with tokens": {"alone_in_turn": True, "everywhere": False},
    # 288 GB/s of a die, both ways of both its links: a quarter for a direction of one.
    "D2D 72 GB/s each way": {"d2d": 72e9},
    # Without pairs the experts of the most tokens come first.
    "A2 hottest first": {"hottest_first": True},
}
STRATEGIES = {"A2": (False, False), "A3": (True, False), "A4": (True, True)}  # paired, rule 5
TOKENS = (16, 64, 256)
FORECASTS, CONTEXTS = ("none", "cross_layer", "perfect"), (64, 1024)  # tokens that attention reads for each
# Slack, spare requests as a part of the batch, and whether requests arrive together.
BUFFERED = ((0.1, 1, False), (0.1, 1, True), (0.2, 0, False), (0.2, 1, False), (0.2, 1, True), (0.3, 1, True))
THRESHOLDS = (2, 4, 8, 16)  # theta_min: an expert of fewer tokens makes requests wait; below 2 none does


@cache
def decided(paired: bool):
    """Compiled: groups and following dies of an array's tokens."""
    ring = ring_of(machine_of(BASE).topology)
    return jax.jit(
        lambda tokens: (groups_in_order(tokens, paired), trajectories(tokens, ring).following.argmax(axis=-1))
    )


def seconds_of(
    model: str,
    counts: np.ndarray,
    in_turn: bool = False,
    everywhere: bool = True,
    pooled: bool = False,
    tile: float = 8.0,
    ddr: float = BASE.ddr,
    sram: float = BASE.sram,
    cut: int = BASE.micro_slices,
    alone_in_turn: bool = False,
    hottest_first: bool = False,
    d2d: float = BASE.d2d,
) -> dict[str, float]:
    """Simulated seconds of A2 to A4, and of expert parallelism, serial and with prefetch.

    Slices are cut in `cut`, or in as many as leave the buffers half as many slots again as they need.
    """
    case = BASE._replace(ddr=ddr, sram=sram, d2d=d2d)
    layer = described(machine_of(case), costs_of(model), tile)
    if pooled:
        layer = replace(layer, memory=(Memory(np.array([DIES * ddr]), np.zeros(1), np.zeros(DIES, int)),))
    slots = sram / (layer.expert_bytes / DIES)
    cut = max(cut, int(np.ceil(1.5 * DIES / slots)))
    found = {}
    for name, (paired, balanced) in STRATEGIES.items():
        groups, following = map(np.asarray, decided(paired)(jnp.asarray(counts, jnp.float32)))
        if hottest_first and not paired:
            groups = np.argsort(-counts.sum(axis=1), kind="stable")[:, None]
        alone = in_turn or (alone_in_turn and not paired)
        slicing = Slicing(cut, sram, CONTROL, matched=paired, balanced=balanced, in_turn=alone)
        loading = (counts > 0) | everywhere | (counts.sum(axis=1, keepdims=True) == 0)
        found[name] = stream(flow_of(layer, slicing, counts, groups, following, loading)).seconds
    host = np.arange(len(counts)) * DIES // len(counts)
    for name, prefetch in (("ep", False), ("ep_prefetch", True)):
        found[name] = offloaded(layer, counts.sum(axis=1), host, prefetch, CONTROL)
    return found


def readings(name: str, model: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Means over seeds of gating, and the least and most that A3 gains."""
    counts = [tokens_of(model, tokens, DIES, np.random.default_rng(seed)) for seed in SEEDS]
    seen = [seconds_of(model, each, **READINGS[name]) for each in counts]
    gains = [each["A2"] / each["A3"] for each in seen]
    row = {"reading": name, "model": model, "tokens": tokens}
    row |= {f"{key}_s": float(np.mean([each[key] for each in seen])) for key in seen[0]}
    yield row | {"A3_least": min(gains), "A3_most": max(gains)}


def buffering() -> Iterator[dict[str, Any]]:
    """Forward passes a second of A5 over A3, with and without requests that take the places of those that wait."""
    for model, layers in (("qwen3-30b-a3b", 4), ("qwen3-30b-a3b", 16), ("phi-3.5-moe", 4)):
        for tokens in (16, 64):
            shown = ",".join(map(str, range(layers)))
            plain = passes_per_s(model, tokens, shown, "system.strategy=fse_paired")
            for slack, spare, together in BUFFERED:
                settings = {"slack": slack, "spare_requests": spare, "arrive_together": together}
                overrides = [f"system.{key}={str(one).lower()}" for key, one in settings.items()]
                found = passes_per_s(model, tokens, shown, "system.strategy=fse_buffered", *overrides)
                yield {"model": model, "layers": layers, "tokens": tokens, **settings, "over_A3": found / plain}
            jax.clear_caches()


def thresholds() -> Iterator[dict[str, Any]]:
    """Forward passes a second of A5 over A3 by theta_min; places are taken, requests arrive together, slack is 20 %."""
    for model, tokens in product(("qwen3-30b-a3b", "phi-3.5-moe"), (16, 64)):
        plain = passes_per_s(model, tokens, "0,1,2,3", "system.strategy=fse_paired")
        waiting = ("system.strategy=fse_buffered", "system.slack=0.2", "system.arrive_together=true")
        for least in THRESHOLDS:
            found = passes_per_s(model, tokens, "0,1,2,3", *waiting, f"system.least_tokens={least}")
            yield {"model": model, "tokens": tokens, "least_tokens": least, "over_A3": found / plain}
        jax.clear_caches()


def passes_per_s(model: str, tokens: int, layers: str, *overrides: str) -> float:
    runs, iterations, _ = ready(model, tokens, layers, END_STEPS, *overrides)
    rolled = runs["expert_streaming"].rollout(iterations.batches)
    return float(rolled.figures.get("finished_passes", tokens * END_STEPS) / rolled.time.total.sum())


def prefetched() -> Iterator[dict[str, Any]]:
    """Loads in a forecast order while attention leaves DDR idle (IV-A): A3 of Qwen3 with attention, by the model."""
    for tokens, context in product((16, 256), CONTEXTS):
        plain = 0.0
        for forecast in FORECASTS:
            settings = (
                "system.strategy=fse_paired",
                f"system.prefetch={forecast}",
                f"workload.context_tokens={context}",
            )
            runs, iterations, _ = ready("qwen3-30b-a3b", tokens, "0,1,2,3", 8, *settings)
            run = runs["expert_streaming"]
            rolled = run.rollout(iterations.batches)
            seconds = float(rolled.time.total.mean())
            plain = plain or seconds
            idle = float(run.layer.idle_seconds(jnp.asarray(float(tokens))).mean())
            row = {"tokens": tokens, "context": context, "forecast": forecast, "layer_s": seconds}
            row |= {"over_none": plain / seconds, "idle_ddr_s": idle}
            yield row | {"prefetched": float(rolled.figures.get("prefetched", 0.0))}
        jax.clear_caches()


CASES = [*product(READINGS, MODELS, TOKENS)]
TABLES = [
    Table("readings", readings, CASES, ("reading", "model", "tokens"), digits=5),
    *tables_of({"buffering": buffering, "threshold": thresholds, "prefetch": prefetched}, digits=5),
]

if __name__ == "__main__":
    make_tables(HERE, TABLES, study_options(__doc__, resume=True).parse_args())
