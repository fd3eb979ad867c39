"""Token-layers per second of drawing a synthetic trace, beside a NumPy loop over tokens and layers; see README.md.

A token-layer is the choice of one token in one layer. Processes are presets of the shapes of DeepSeek-V2-Lite and
Mixtral, and that of DeepSeek-V3. Compilation is timed apart, runs are warmed up, the best of several is kept. The
NumPy loop draws from the same process, one request, vectorised over experts.
"""

import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from throughput import machine

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.traces.synthesis import PRESETS, GatingProcess, sample_trace

HERE = Path(__file__).resolve().parent
BASE = PRESETS["qwen3-235b-a22b"]
SHAPES = {
    "E=64, K=6, 26 layers": (replace(BASE, num_experts=64, top_k=6, layer_ids=range(26)), 131_072),
    "E=8, K=2, 32 layers": (replace(BASE, num_experts=8, top_k=2, layer_ids=range(32)), 131_072),
    "deepseek-v3: E=256, K=8, 58 layers": (PRESETS["deepseek-v3"], 16_384),
}
NUMPY_TOKENS = 64
RUNS = 3


def drawn(process: GatingProcess, tokens: int, seed: int) -> float:
    """Seconds of drawing a trace."""
    begun = time.perf_counter()
    sample_trace(process, tokens, seed)
    return time.perf_counter() - begun


def numpy_seconds(process: GatingProcess, tokens: int) -> float:
    """Seconds of drawing one request in NumPy: popularity, relations and co-activation, without topics."""
    part = {name: np.asarray(getattr(process.preferences, name)) for name in ("popularity", "from_layer", "from_token")}
    slowdown = np.exp(-np.asarray(process.preferences.together))
    rng = np.random.default_rng(0)
    layers, experts = part["popularity"].shape
    before = np.zeros((layers, process.top_k), int)
    begun = time.perf_counter()
    for _ in range(tokens):
        for layer in range(layers):
            log_weight = part["popularity"][layer] + part["from_token"][layer, before[layer]].sum(axis=0)
            if layer:
                log_weight = log_weight + part["from_layer"][layer, before[layer - 1]].sum(axis=0)
            arrival = rng.standard_exponential(experts) * np.exp(log_weight.max() - log_weight)
            for k in range(process.top_k):
                first = before[layer, k] = arrival.argmin()
                arrival = (arrival - arrival[first]) * slowdown[layer, first]
                arrival[before[layer, : k + 1]] = np.inf
    return time.perf_counter() - begun


def measure(name: str) -> list[dict[str, object]]:
    """One row of the table."""
    preset, tokens = SHAPES[name]
    process = preset.process()
    jax.clear_caches()
    first = drawn(process, tokens, seed=0)
    again = min(drawn(process, tokens, seed=0) for _ in range(RUNS))
    rate = tokens * len(process.layer_ids) / again
    numpy_rate = NUMPY_TOKENS * len(process.layer_ids) / numpy_seconds(process, NUMPY_TOKENS)
    row = {
        "process": name,
        "tokens": tokens,
        "token_layers_per_s": round(rate),
        "tokens_per_s": round(tokens / again),
        "compile_s": f"{first - again:.2f}",
        "numpy_token_layers_per_s": round(numpy_rate),
        "over_numpy": f"{rate / numpy_rate:.1f}",
        "machine": machine(),
    }
    return [row]


if __name__ == "__main__":
    shapes = [(name,) for name in SHAPES]
    table = Table("synthesis", measure, shapes, ("process",), timed=True)
    make_tables(HERE, [table], study_options(__doc__).parse_args())
