"""Rows of measured systems as deployments: which GPUs, which precisions, how many requests in flight."""

import csv
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmoe.models import GroupedQueryAttention, dense_model
from jaxmoe.serving.deployment import Deployment

# Models of the rows by the names of their weights; other rows are not covered.
MODELS = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "zhipuai/GLM-5": "glm-5",
}


EIGHT_GROUPS = GroupedQueryAttention(64, 8, 128)
# Models of rows without experts, by the configurations that they were published with.
DENSE = {
    "meta-llama/Llama-3.1-70B": dense_model("llama-3.1-70b", 8192, 80, 28672, 128256, EIGHT_GROUPS),
    "meta-llama/Llama-3.1-8B-Instruct": dense_model(
        "llama-3.1-8b", 4096, 32, 14336, 128256, GroupedQueryAttention(32, 8, 128)
    ),
    "nvidia/Qwen3-32B-NVFP4": dense_model("qwen3-32b", 5120, 64, 25600, 151936, EIGHT_GROUPS),
}
# All columns but these, and the concurrency in `silicon_data_source`, make a configuration.
NO_CONFIGURATION = ("id", "silicon_data_source", "silicon_ttft_ms", "silicon_tpot_ms")
NARROW = {"fp8": "fp8_block", "int4_wo": "bfloat16"}  # products of models whose experts alone are of int4


@dataclass(frozen=True)
class Measured:
    """One configuration: medians of its repeats, s."""

    columns: dict[str, str]
    concurrency: int | None
    first_token: float
    per_token: float

    @property
    def pair(self) -> tuple[str, str]:
        """Model and system."""
        return self.columns["model_path"], self.columns["system"]

    @property
    def left_out_with(self) -> tuple[str, str]:
        """What is left out as a whole: the pair, with other names of one model, whose rows may be one measurement."""
        return MODELS.get(self.pair[0], self.pair[0]), self.pair[1]


def read_rows(path: Path, mode: str = "agg", models: Collection[str] = frozenset(MODELS)) -> list[Measured]:
    """Rows of a mode and of known models, a configuration each; names of models that are in no list are printed."""
    with path.open(newline="", encoding="utf-8") as file:
        given = [row for row in csv.DictReader(file) if row["mode"] == mode]
    if unknown := sorted({row["model_path"] for row in given} - {*MODELS, *DENSE}):
        print(f"left out, not described here: {', '.join(unknown)}")
    rows = [row for row in given if row["model_path"] in models]
    found = defaultdict(list)
    for row in rows:
        found[configuration(row)].append(row)
    return [_measured(repeats) for repeats in found.values()]


def configuration(row: dict[str, str]) -> tuple[object, ...]:
    """What tells configurations apart."""
    return (*(value for name, value in row.items() if name not in NO_CONFIGURATION), concurrency_of(row))


def concurrency_of(row: dict[str, str]) -> int | None:
    """Requests in flight, where a row states them."""
    told = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return int(told.group(1)) if told else None


def _measured(repeats: list[dict[str, str]]) -> Measured:
    first, each = (np.median([float(row[name] or "nan") for row in repeats]) * 1e-3 for name in NO_CONFIGURATION[2:])
    return Measured(repeats[0], concurrency_of(repeats[0]), float(first), float(each))


def deployment_of(row: dict[str, str]) -> Deployment:
    """The deployment of a row.

    Some rows count GPUs twice: one measurement stands as tensor 4 with experts on 4 and as tensor 4, data 4 with
    experts on 16. Where experts have the square of the GPUs, they are taken to be the GPUs, and attention is data
    parallel over them where the row says so.
    """
    tensor, cut, ranks = (int(row[name]) for name in ("tp_size", "moe_tp_size", "moe_ep_size"))
    data = int(row["attention_dp_size"] or 1)
    if tensor > 1 and data == tensor and cut * ranks == tensor * data:
        tensor, ranks = 1, data
    elif cut == ranks and max(tensor, data) == cut * ranks and cut > 1:
        tensor, data = (ranks, 1) if data == 1 else (1, ranks)
    elif tensor * data < cut * ranks:
        tensor = cut * ranks // data
    return Deployment(row["backend"], tensor, data, ranks, *precisions(row))


def precisions(row: dict[str, str]) -> tuple[str, str, str]:
    """Precisions of products, experts and the cache, which rows do not state: FP8 where experts are FP8 or FP4."""
    products, experts = row["gemm_quant_mode"], row["moe_quant_mode"]
    if row["model_path"].startswith("openai/"):
        return "bfloat16", "w4a16_mxfp4", "bfloat16"
    cache = "bfloat16" if experts in ("int4_wo", "bfloat16") else "fp8"
    return NARROW.get(products, products), {"fp8": "fp8_block"}.get(experts, experts), cache


def requests_in_flight(rows: Iterable[Measured], deployment: Deployment) -> list[float]:
    """Requests of each row; `batch_size` is of one data-parallel rank."""
    return [float(row.concurrency or int(row.columns["batch_size"]) * deployment.data) for row in rows]
