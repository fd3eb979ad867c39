"""What does imbalance cost a fused MoE kernel, as measured, as told of shapes not fitted, and under real gating?

    python studies/measured/imbalance.py --data ../shared/measured/gpu --traces ../shared/traces

Fits the MoE kernels of each system, which takes minutes. Writes imbalance.csv (power laws over balanced tokens),
eplb.csv (EPLB over experts in their order) and price_of_traces.csv (real gating beside power laws, by the kernels that
ship).
"""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from imbalance_prices import (
    Prices,
    by_part,
    joined,
    of_copies,
    of_skew,
    price_scores,
)

import jaxmoe as jm
from jaxmoe.config.files import find_kernels
from jaxmoe.experiment.measured_kernels.calibration import KernelFit, calibrate_tables
from jaxmoe.experiment.measured_kernels.tables import read_table
from jaxmoe.experiment.measured_kernels.token_counts import loads_of, mean_loads
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.hardware.gpu.files import read_kernels
from jaxmoe.hardware.gpu.sheet import ACTIVATION_BYTES, WEIGHT_BYTES, sheet_of
from jaxmoe.hardware.gpu.terms import ExpertLoads, fused_moe
from jaxmoe.traces import load_counts, read_loads, read_trace

HERE = Path(__file__).resolve().parent
SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm")
SEED = 0
MANY = 64  # choices of a rank above which EPLB is judged
BACKENDS = ("trtllm", "sglang", "vllm")
KERNEL = ("trtllm", "bfloat16")  # that real gating is told by
RANKS, TOKENS, DRAWS = 8, (1024, 16384), 8
ALPHAS = ("power_law_1.01", "power_law_1.2")
MODELS = {  # folders of traces, and what a model is called
    "mixtral-8x7b": "Mixtral 8x7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "olmoe-1b-7b": "OLMoE",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
}


def fitted(folder: Path, name: str) -> list[KernelFit]:
    """Fits of one kind of table of a system, if it has any."""
    tables = [read_table(path) for path in sorted(folder.glob(f"moe/*/{name}_perf.parquet"))]

    def report(_: str, done: int, total: int) -> None:
        print(f"{folder.name}, {name}: {done} of {total} kernels", flush=True)

    return calibrate_tables(tables, sheet_of(folder.name), SEED, report)


def of_systems(fits: dict[str, list[KernelFit]]) -> Iterator[dict[str, object]]:
    """Prices of skew by system and backend, in all and by skew and ranks."""
    for system, found in fits.items():
        for backend in (*BACKENDS, "all"):
            some = [fit for fit in found if backend in ("all", fit.kernel["framework"])]
            prices = joined(map(of_skew, some))
            yield from _parts(prices, {"system": system, "backend": backend})


def _parts(prices: Prices, names: dict[str, object]) -> Iterator[dict[str, object]]:
    yield names | {"distribution": "all", "ranks": "all"} | price_scores(prices)
    for columns in ({"distribution": prices.distribution}, {"ranks": prices.ranks}):
        for row in by_part(prices, columns):
            yield names | {"distribution": "all", "ranks": "all"} | row


def of_slots(fits: dict[str, list[KernelFit]]) -> Iterator[dict[str, object]]:
    """Prices of EPLB by system, in all and by skew and ranks, where a rank has many choices."""
    for system, found in fits.items():
        if found:  # not measured on every system
            prices = joined(map(of_copies, found))
            yield from _parts(prices.where(prices.choices > MANY), {"system": system})


# Real gating.


def frequencies(folder: Path) -> dict[str, np.ndarray]:
    """Parts of choices, [layer, expert], by dataset: of traces or, where there are none, of loads."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        loads = read_loads(path) if path.name.startswith("load_") else load_counts(read_trace(path))
        counts = loads.counts.sum(axis=0).astype(float)
        found[path.stem.removeprefix("load_")] = counts / counts.sum(axis=1, keepdims=True)
    return found


def fullest(counts: np.ndarray) -> np.ndarray:
    """Choices of the experts of the rank with the most, [draw, expert], of [draw, every expert]."""
    ranks = counts.reshape(len(counts), RANKS, -1)
    return ranks[np.arange(len(counts)), ranks.sum(axis=2).argmax(axis=1)]


def of_traces(traces: Path) -> Iterator[dict[str, object]]:
    """What real gating costs the fullest of eight ranks, beside power laws, by layer in the mean."""
    file = read_kernels(find_kernels("kernels/h100_sxm.json"))
    rng = np.random.default_rng(SEED)
    for name, title in MODELS.items():
        model = jm.model(name)
        kernel = max(
            (each for each in file.of_kind("moe") if (each.names["framework"], each.names["moe_dtype"]) == KERNEL),
            key=lambda each: each.told["rows"],
        )
        shape = (model.hidden_size, model.expert_size, model.num_experts, model.top_k)

        def seconds(loads: list[ExpertLoads], shape=shape, kernel=kernel) -> np.ndarray:
            hidden, inner, experts, top_k = (jnp.full(len(loads), float(each)) for each in shape)
            some = ExpertLoads(*(jnp.asarray(np.stack(part), jnp.float32) for part in zip(*loads, strict=True)))
            precision = kernel.names["moe_dtype"]
            weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
            args = (some, hidden, inner, experts / RANKS, top_k, 3.0, file.sheet, precision, weight, activation)
            return np.asarray(kernel.fitted.seconds(fused_moe(*args)))

        for tokens in TOKENS:
            experts, top_k = shape[2:]
            told = {each: loads_of(tokens, experts, top_k, RANKS, each) for each in ("balanced", *ALPHAS)}
            even, *skewed = seconds(list(told.values()))
            for dataset, parts in frequencies(traces / name).items():
                drawn = rng.multinomial(tokens * top_k, parts[None].repeat(DRAWS, axis=0))  # [draw, layer, expert]
                drawn = np.minimum(drawn, tokens)
                loads = [mean_loads(fullest(drawn[:, layer]), float(tokens)) for layer in range(len(parts))]
                price = seconds(loads) / even
                yield {
                    "model": title,
                    "dataset": dataset,
                    "tokens": tokens,
                    "layers": len(parts),
                    "price": price.mean(),
                    "price_of_worst_layer": price.max(),
                    "load": np.mean([load.slots for load in loads]) * RANKS / (tokens * top_k),
                    **{each: float(value / even) for each, value in zip(ALPHAS, skewed, strict=True)},
                    **{f"load_{each}": told[each].slots * RANKS / (tokens * top_k) for each in ALPHAS},
                }


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    parser.add_argument("--traces", type=Path, required=True, help="folder of real gating traces and loads by model")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="folders of --data")
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    write_table(out / "price_of_traces.csv", list(of_traces(options.traces)), digits=4)
    slots = {system: fitted(options.data / system, "wideep_moe") for system in options.systems}
    write_table(out / "eplb.csv", list(of_slots(slots)), digits=4)
    whole = {system: fitted(options.data / system, "moe") for system in options.systems}
    write_table(out / "imbalance.csv", list(of_systems(whole)), digits=4)


if __name__ == "__main__":
    main()
