"""Step tables of a run: from its kernel profile, with or without a part, and from the shipped machine."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from runs import Run

from jaxmoe.config.files import find_kernels
from jaxmoe.errors import InputError
from jaxmoe.experiment.measured_kernels.tables import read_columns
from jaxmoe.hardware.gpu.files import KernelFile, KnownKernel, read_kernels
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Given, Kernels, Seconds
from jaxmoe.serving.online.from_profile import Collective, profile_table
from jaxmoe.serving.online.from_step import step_table
from jaxmoe.serving.online.padding import Padding, graph_sizes
from jaxmoe.serving.online.profile import Curve, KernelProfile
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.step import ModelStep

KERNELS = {"RTXPRO6000": "rtx_pro_6000_server"}  # whose fitted kernels jaxmoe ships, by LLMServingSim's name of it
GRAPH = "vLLM_custom_graph"  # an all-reduce inside a CUDA graph
SOURCES, OPERATIONS = (GRAPH, "NCCL"), ("all_reduce", "all_gather", "reduce_scatter")
MILLI = 1e-3
ELEMENT_BYTES = 2
TILE_ROWS = 128  # of FlashAttention 2 with heads of 128: a query that decodes beside a prompt fills one alone
Named = tuple[str, StepTable]


def tables_of(run: Run, profile: KernelProfile, exchange: Path | None, other: Path | None = None) -> Iterator[Named]:
    """Names and tables: as it is, then with one part left out or by `other` exchanges, then the shipped machine."""
    padding, parallel = Padding(graph_sizes(run.fleet.engine.seats)), run.deployment.devices > 1
    laid = (profile, run.model, run.deployment)
    collective = measured(exchange, run.deployment.devices) if parallel else nothing
    yield "profile", profile_table(*laid, collective, padding)
    if parallel:
        yield "without exchange", profile_table(*laid, nothing, padding)
    if parallel and other is not None and other.is_file():
        elsewhere = measured(other, run.deployment.devices)
        yield f"exchange of {other.parent.name}", profile_table(*laid, elsewhere, padding)
    yield "contexts equally long", profile_table(*laid, collective, padding, skew=False)
    yield "without padding", profile_table(*laid, collective)
    if run.hardware in KERNELS:
        yield "shipped machine", shipped(run, padding)


def nothing(operation: str, bytes_: np.ndarray) -> np.ndarray:
    """An exchange that takes no time."""
    return np.zeros_like(bytes_)


def measured(path: Path | None, ranks: int) -> Collective:
    """Collectives of so many GPUs by a table; where it has but the all-reduce, a gather and a scatter are its halves.

    A ring's all-reduce is just these two. Raises `InputError` for a table that has none.
    """
    if path is None or not path.is_file():
        raise InputError(f"{path}: no such file; the run has exchanges, so give measured ones with --exchange FILE")
    columns = read_columns(path)
    kept = (columns["num_gpus"].astype(int) == ranks) & np.isin(columns["kernel_source"], SOURCES)
    kept &= columns.get("nccl_dtype", np.full(len(kept), "half")) == "half"
    curves = {name: _curve(columns, kept & (columns["op_name"] == name)) for name in OPERATIONS}
    if curves["all_reduce"] is None:
        raise InputError(f"{path}: has no all_reduce of {ranks} GPUs by {' or '.join(SOURCES)}; give a table that has")

    def seconds(operation: str, bytes_: np.ndarray) -> np.ndarray:
        own = curves[operation]
        return curves["all_reduce"].at(bytes_) / 2 if own is None else own.at(bytes_)

    return seconds


def _curve(columns: dict[str, np.ndarray], rows: np.ndarray) -> Curve | None:
    """Seconds by bytes; none without rows."""
    sizes, times = (columns[name][rows].astype(float) for name in ("message_size", "latency"))
    order = np.argsort(sizes)
    return Curve(sizes[order] * ELEMENT_BYTES, times[order] * MILLI) if rows.any() else None


class OfVersion(Kernels):
    """Kernels with the all-reduce of one version of the engine, of which a gather and a scatter are halves."""

    def __init__(self, file: KernelFile, version: str) -> None:
        super().__init__(file, "vllm")
        object.__setattr__(self, "version", version)

    def _exchanges(self, operation: str) -> list[KnownKernel]:
        known = [each for each in self.file.of_kind("all_reduce") if each.names["kernel_source"] == GRAPH]
        return [max(known, key=lambda each: (each.names["version"] == self.version, each.names["version"]))]

    def collective(self, operation: str, bytes_: Given, ranks: Given) -> Seconds:
        whole = super().collective("all_reduce", bytes_, ranks)
        return whole if operation == "all_reduce" else jnp.asarray(whole) / 2


def shipped(run: Run, padding: Padding) -> StepTable:
    """The step by kernels that were fitted to other people's tables of single kernels."""
    file = read_kernels(find_kernels(f"kernels/{KERNELS[run.hardware]}.json"))
    gating = expert_loads(run.model.num_experts, run.model.top_k, run.deployment.expert_ranks)
    step = ModelStep(run.model, run.deployment, OfVersion(file, run.version), gating)
    return step_table(step, padding, mixed_rows=TILE_ROWS)
