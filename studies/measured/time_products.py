"""Times matrix products of models on the GPU that is here, in the columns of the measured tables; see README.md.

    python studies/measured/time_products.py --out FILE.csv

Needs PyTorch on an NVIDIA GPU, nothing of jaxmoe, and a minute. Products are in bfloat16, by PyTorch's library, as all
three backends run them. Heights are none of those in the tables, widths those of five models. Calls are replayed from
one graph, with several weights in turn, and the median of several replays is kept. `weights` says which: `six` random
ones, as many as the measured tables had, `zeros`, six again, or as many random ones as do not fit the cache, `cold`.
"""

from __future__ import annotations  # PyTorch may not be here

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None

HEIGHTS = (20, 40, 100, 200, 400, 700, 1500, 3000, 6000)
WIDTHS = {  # of what (n, k) a product has in a model
    "DeepSeek-V3": ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168, 2048), (36864, 7168)),
    "Qwen3-235B-A22B": ((9216, 4096), (4096, 8192), (151936, 4096)),
    "Mixtral-8x7B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "gpt-oss-120b": ((5120, 2880), (2880, 4096)),
    "DeepSeek-V2-Lite": ((3072, 2048), (576, 2048), (2048, 2048), (102400, 2048)),
}
COLUMNS = ("framework", "version", "device", "op_name", "kernel_source", "gemm_dtype", "model", "weights")
SHAPE = ("m", "n", "k", "latency")
WEIGHTS = ("six", "zeros", "cold")
SIX = 6
CACHE_BYTES = 60e6
REPLAYS, LEAST_MS, MOST_CALLS = 7, 2.0, 400


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What a call launches, to be replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed_ms(graph: torch.cuda.CUDAGraph) -> float:
    """The median of several replays, ms."""
    times = []
    for _ in range(REPLAYS + 1):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[1:])  # the first warms up


def weights_of(kind: str, n: int, k: int) -> list[torch.Tensor]:
    """Weights that calls take in turn, [n, k] each."""
    count = max(SIX, int(2 * CACHE_BYTES / (2 * n * k)) + 1) if kind == "cold" else SIX
    made = torch.zeros if kind == "zeros" else torch.randn
    return [made(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def product_ms(m: int, weights: list[torch.Tensor]) -> float:
    """One product of random [m, k] and the transpose of a weight, ms."""
    tokens = torch.randn(m, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)

    def calls(times: int) -> Callable[[], None]:
        def work() -> None:
            for call in range(times):
                torch.nn.functional.linear(tokens, weights[call % len(weights)])

        return work

    once = replayed_ms(graph_of(calls(SIX))) / SIX
    times = min(max(len(weights), int(LEAST_MS / once) + 1), MOST_CALLS)
    return replayed_ms(graph_of(calls(times))) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table to write, CSV")
    out = parser.parse_args().out
    if torch is None or not torch.cuda.is_available():
        sys.exit("products are timed by PyTorch on an NVIDIA GPU; install PyTorch for it, or run this where it is")
    torch.manual_seed(0)
    known = ("VLLM", f"torch {torch.__version__}", torch.cuda.get_device_name(), "gemm")
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow((*COLUMNS, *SHAPE))
        for (model, widths), kind in product(WIDTHS.items(), WEIGHTS):
            for n, k in widths:
                weights = weights_of(kind, n, k)
                for m in HEIGHTS:
                    kernel = (*known, "torch.nn.functional.linear", "bfloat16", model, kind)
                    table.writerow((*kernel, m, n, k, f"{product_ms(m, weights):.6f}"))


if __name__ == "__main__":
    main()
