"""Model against event simulator on random machines, and the order of experts by gradient against the optimum.

Writes `agreement.csv`, `own_dies.csv` and `order.csv`, and prints what they come to:
`python studies/expert_streaming/agreement.py`.
"""

import time
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from order import Streams, order_seconds, tuned_order

from jaxmoe.des.description import LayerDescription, Memory
from jaxmoe.des.fabric import fabric_of
from jaxmoe.des.streaming import stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.engine import LayerCosts, LoadRules, SliceCosts, StreamPipeline, StreamTokens
from jaxmoe.engine.streaming import (
    NONE,
    slice_demand,
    trips_of,
)
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.hardware import Die, Machine, MemoryLevel, Mesh
from jaxmoe.hardware.kernels import TiledGemm
from jaxmoe.hardware.networks import num_links
from jaxmoe.methods.expert_streaming.trajectories import streams
from jaxmoe.relax import HardMax

HERE = Path(__file__).parent
# Hidden size, expert size of Table I, experts, experts of a token, shared experts.
MODELS = {
    "phi-3.5-moe": (4096, 3200, 16, 2, 0),
    "yuan2.0-m32": (2048, 4096, 32, 2, 0),
    "deepseek-moe-16b": (2048, 1408, 64, 6, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
}
MOST_EXPERTS = 128
TOKENS = (16, 64, 256, 1024)
STRATEGIES: dict[str, dict[str, bool]] = {
    "fse_naive": {"paired": False, "in_turn": True},
    "fse": {"paired": False},
    "fse_paired": {"paired": True, "matched": True},
    "fse_rule5": {"paired": True, "matched": True, "balanced": True},
}
# Experts that only dies with their tokens load; A2 takes one after the other (`readings.py`).
OWN_DIES: dict[str, dict[str, bool]] = {
    "A2 in turn, by dies with tokens": {"paired": False, "in_turn": True, "everywhere": False},
    "A3 by dies with tokens": {"paired": True, "matched": True, "everywhere": False},
}
MACHINES, SEED, CONTROL, TILE = 200, 5, 2e-7, 8.0
SPARE = 1.5  # times the slots that a buffer needs at least


class Drawn(NamedTuple):
    """A machine with a cut: B/s, FLOP/s, B."""

    shape: tuple[int, int]
    ddr: float
    d2d: float
    flops: float
    sram: float
    micro_slices: int


def drawn(rng: np.random.Generator, expert_bytes: float) -> Drawn:
    """Log-uniform: DDR 12.8 to 102.4 GB/s a die, D2D 72 to 576, half to twice the MACs, SRAM 8 to 64 MB.

    Slices are cut in 2 to 10, or in as many as leave the buffers `SPARE` times the slots that they need.
    """

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    shape = (2, 2) if rng.random() < 0.7 else (3, 3)
    sram = between(8e6, 64e6)
    least = int(np.ceil(SPARE * expert_bytes / sram))
    rates = between(12.8e9, 102.4e9), between(72e9, 576e9), 3.2768e12 * between(0.5, 2.0)
    return Drawn(shape, *rates, sram, max(int(rng.integers(2, 11)), least))


def machine_of(case: Drawn) -> Machine:
    """Its dies with private DDR."""
    dies, links = case.shape[0] * case.shape[1], num_links(case.shape)
    port = jnp.full(dies, case.d2d, jnp.float32)
    mesh = Mesh(
        jnp.full(links, case.d2d, jnp.float32),
        jnp.full(links, 4.02e-9, jnp.float32),
        injection_bandwidth=port,
        ejection_bandwidth=port,
        shape=case.shape,
    )
    ddr = MemoryLevel(jnp.full(dies, case.ddr, jnp.float32), jnp.zeros(dies), None, jnp.arange(dies), "ddr")
    gemm = TiledGemm(jnp.asarray(TILE), jnp.asarray(1.0), jnp.asarray(0.0))
    return Machine(mesh, Die(jnp.full(dies, case.flops, jnp.float32), gemm), (ddr,))


def costs_of(model: str) -> LayerCosts:
    """One byte a weight and an element."""
    hidden, size, *_ = MODELS[model]
    numbers = (hidden, hidden, 3 * hidden * size, 6 * hidden * size, size, 3)
    return LayerCosts(*(jnp.asarray(float(number)) for number in numbers))


def slices_of(model: str, micro_slices: int, sram: float, dies: int, control: float = CONTROL) -> SliceCosts:
    """The model's experts, cut for dies that have a buffer of so many bytes each."""
    room = jnp.full(dies, sram, jnp.float32)
    return SliceCosts(costs_of(model), jnp.asarray(float(micro_slices)), room, jnp.asarray(control))


def tokens_of(model: str, tokens: int, dies: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of each expert on each die: log-normal popularity of width 0.8, every token its top k by Gumbel."""
    _, _, experts, top_k, shared = MODELS[model]
    scores = 0.8 * rng.standard_normal(experts) + rng.gumbel(size=(tokens, experts))
    chosen, home = np.argsort(-scores, axis=1)[:, :top_k], np.arange(tokens) * dies // tokens
    counts = np.zeros((experts, dies), int)
    np.add.at(counts, (chosen, home[:, None]), 1)
    return np.concatenate([np.tile(np.bincount(home, minlength=dies), (shared, 1)), counts])


def described(machine: Machine, costs: LayerCosts, tile: float = TILE) -> LayerDescription:
    """The same for the simulator, with its own tiles."""
    flops, columns = np.asarray(machine.die.flops, float), float(costs.columns)
    per_column = float(costs.flops_per_token_expert) / columns
    ddr = machine.memory[-1]

    def gemm(die, tokens, part):
        return np.ceil(tokens / tile) * tile * np.ceil(part * columns - 1e-5) * per_column / flops[die]

    memory = Memory(np.asarray(ddr.bandwidth, float), np.asarray(ddr.latency, float), np.asarray(ddr.channel))
    fabric = fabric_of(machine.topology, None, cut_through=True)
    bytes_ = float(costs.expert_bytes)
    return LayerDescription(
        fabric, flops, 1.0, 1.0, bytes_, per_column * columns, "replicated", memory=(memory,), gemm=gemm
    )


@cache
def modelled(strategy: str):
    """Compiled: seconds, and what the simulator is given, from a machine, costs of slices and tokens."""
    flags = {"matched": False, "everywhere": True} | (STRATEGIES | OWN_DIES)[strategy]
    paired, everywhere = flags.pop("paired"), flags.pop("everywhere")
    rules = LoadRules(**flags, uncut=strategy == "fse_naive")

    @eqx.filter_jit
    def run(machine: Machine, costs: SliceCosts, tokens):
        decided = streams(machine.topology, StreamTokens(tokens, tokens.sum()), rules, paired, everywhere)
        usage = StreamPipeline(costs, decided).usage(machine, HardMax())
        return usage.seconds, decided.groups, decided.following.argmax(axis=-1)

    return run


def both(case: Drawn, model: str, tokens: np.ndarray, strategy: str) -> tuple[float, float]:
    """Seconds by model and by simulator."""
    machine, costs = machine_of(case), costs_of(model)
    dies, naive = tokens.shape[1], strategy == "fse_naive"
    cut = 1 if naive else case.micro_slices
    room = max(case.sram, float(costs.expert_bytes) * 1.001) if naive else case.sram
    # With experts that have no tokens and cost nothing, so that all models are compiled once.
    padded = jnp.zeros((MOST_EXPERTS, dies)).at[: len(tokens)].set(tokens)
    seconds, groups, following = modelled(strategy)(machine, slices_of(model, cut, room, dies), padded)
    groups = np.where(groups < len(tokens), groups, NONE)
    rules = {"matched": False, "everywhere": True} | (STRATEGIES | OWN_DIES)[strategy]
    everywhere = rules.pop("everywhere") | (tokens.sum(axis=1, keepdims=True) == 0)
    del rules["paired"]
    flow = flow_of(
        described(machine, costs),
        Slicing(cut, room, CONTROL, **rules),
        tokens,
        groups,
        np.asarray(following)[: len(tokens)],
        (tokens > 0) | everywhere,
    )
    return float(seconds), stream(flow).seconds


def cases() -> Iterator[tuple[dict[str, Any], str, Drawn, np.ndarray]]:
    """Every machine with one model and number of tokens: its columns, the model, the machine and the tokens."""
    rng = np.random.default_rng(SEED)
    for number in range(MACHINES):
        model, tokens = [*MODELS][number % 4], TOKENS[number // 4 % 4]
        case = drawn(rng, float(costs_of(model).expert_bytes))
        counts = tokens_of(model, tokens, case.shape[0] * case.shape[1], rng)
        columns = {"model": model, "tokens": tokens, "machine": number} | case._asdict()
        yield columns | {"shape": f"{case.shape[0]}x{case.shape[1]}"}, model, case, counts


def agreement() -> list[dict[str, Any]]:
    """All strategies on all machines."""
    rows = []
    for columns, model, case, counts in cases():
        for strategy in STRATEGIES:
            seconds, simulated = both(case, model, counts, strategy)
            rows.append(columns | {"strategy": strategy, "model_s": seconds, "simulated_s": simulated})
    told(rows)
    return rows


def own_dies() -> list[dict[str, Any]]:
    """The same machines of 2x2 where only dies with tokens of an expert load it: none of the constants is of these."""
    rows = [
        columns | {"strategy": strategy, "model_s": seconds, "simulated_s": simulated}
        for columns, model, case, counts in cases()
        if case.shape == (2, 2)
        for strategy in OWN_DIES
        for seconds, simulated in [both(case, model, counts, strategy)]
    ]
    for strategy in OWN_DIES:
        own = [row for row in rows if row["strategy"] == strategy]
        model_s, simulated = (np.array([row[key] for row in own]) for key in ("model_s", "simulated_s"))
        left = ((model_s - simulated) ** 2).sum() / ((simulated - simulated.mean()) ** 2).sum()
        error = 100 * np.abs(model_s / simulated - 1)
        print(f"{strategy}: R2 {1 - left:.4f}, mean error {error.mean():.2f} %, p95 {np.quantile(error, 0.95):.1f} %")
    return rows


def near(simulated: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Whether what is picked of each row is within 2 % of its least."""
    return simulated[np.arange(len(simulated)), picked] <= 1.02 * simulated.min(axis=1)


def told(rows: list[dict[str, Any]]) -> None:
    """What the agreement comes to."""
    model_s, simulated = (np.array([row[key] for row in rows]).reshape(-1, 4) for key in ("model_s", "simulated_s"))
    error = np.abs(model_s / simulated - 1)
    left = ((model_s - simulated) ** 2).sum() / ((simulated - simulated.mean()) ** 2).sum()
    picked = model_s.argmin(axis=1)
    good = near(simulated, picked).mean()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = np.array([row["shape"] == shape for row in rows[::4]])
        within = near(simulated, picked)[here].mean()
        print(f"  {shape}: mean error {100 * error[here].mean():.2f} %, pick within 2 % in {100 * within:.1f} %")
    print(f"R2 {1 - left:.4f}, mean error {100 * error.mean():.2f} %, p95 {100 * np.quantile(error, 0.95):.1f} %")
    for strategy, each in zip(STRATEGIES, error.T, strict=True):
        print(f"  {strategy}: mean error {100 * each.mean():.2f} %")
    print(f"the strategy that the model picks is within 2 % of the simulated best in {100 * good:.1f} % of machines")
    fixed = [near(simulated, np.full(len(simulated), number)).mean() for number in range(4)]
    print("  always the same: " + ", ".join(f"{each} {100 * part:.1f} %" for each, part in zip(STRATEGIES, fixed)))  # noqa: B905
    first = near(simulated[:, :3], model_s[:, :3].argmin(axis=1)).mean()
    same = [near(simulated[:, :3], np.full(len(simulated), number)).mean() for number in (1, 2)]
    print(f"  without rule 5: {100 * first:.1f} %, always A2 {100 * same[0]:.1f} %, always A3 {100 * same[1]:.1f} %")


def small_streams(seed: int, experts: int) -> tuple[Streams, np.ndarray]:
    """A few experts of Phi on 2x2, hot and cold ones, in a tight buffer, and their order in paired load."""
    rng = np.random.default_rng(seed)
    model = "phi-3.5-moe"
    tokens = rng.poisson(np.exp(rng.uniform(0, 5, (experts, 1))) / 4, (experts, 4)) + np.eye(experts, 4, dtype=int)
    tokens[np.arange(experts), rng.integers(4, size=experts)] += 1
    case = Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 8)
    machine, costs = machine_of(case), slices_of(model, case.micro_slices, case.sram, 4)
    counts = jnp.asarray(tokens, jnp.float32)
    decided = streams(machine.topology, StreamTokens(counts, counts.sum()), LoadRules(matched=False))
    asked = slice_demand(machine, costs, decided, trips_of(machine, costs, decided))
    return Streams(machine, costs, asked), np.asarray(decided.groups).ravel()


def orders() -> list[dict[str, Any]]:
    """The order by gradient, paired load, and for up to 8 experts the best of all orders."""
    rows = []
    for experts, cases in ((4, 6), (6, 6), (8, 6), (16, 3)):
        for seed in range(cases):
            given, paired = small_streams(seed, experts)
            started = time.perf_counter()
            starts = np.stack([paired, np.arange(experts), np.random.default_rng(seed).permutation(experts)])
            found = tuned_order(given, starts)
            wall = time.perf_counter() - started
            least = best_of_all(given, experts) if experts <= 8 else float("nan")
            row = {"experts": experts, "seed": seed, "paired_s": found.starts[0], "by_number_s": found.starts[1]}
            rows.append(row | {"rounded_s": found.rounded, "tuned_s": found.seconds, "best_s": least, "wall_s": wall})
    gaps = [row["tuned_s"] / row["best_s"] - 1 for row in rows if row["experts"] <= 8]
    gains = [row["paired_s"] / row["tuned_s"] for row in rows]
    print(f"above the optimum: at most {100 * max(gaps):.2f} %")
    print(f"paired load takes {min(gains):.4f} to {max(gains):.4f} as long")
    return rows


@eqx.filter_jit
def least_of(given: Streams, orders):
    """The least seconds of many orders, compiled once for a number of experts."""
    experts = orders.shape[1]
    return jax.lax.map(lambda each: order_seconds(given, jax.nn.one_hot(each, experts)), orders, batch_size=256).min()


def best_of_all(given: Streams, experts: int) -> float:
    """Every order once, but for who is first in a group."""
    orders = [each for each in permutations(range(experts)) if all(a < b for a, b in zip(each[::2], each[1::2]))]  # noqa: B905
    return float(least_of(given, jnp.asarray(orders)))


TABLES = {"agreement": agreement, "own_dies": own_dies, "order": orders}

if __name__ == "__main__":
    make_tables(HERE, tables_of(TABLES, digits=6, timed=["order"]), study_options(__doc__).parse_args())
