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
from jaxmoe.serving.online.profile import Profile, onto
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.step import ModelStep

KERNELS = {"RTXPRO6000": "rtx_pro_6000_server"}  # whose fitted kernels jaxmoe ships, by LLMServingSim's name of it
GRAPH = "vLLM_custom_graph"  # an all-reduce inside a CUDA graph
ELEMENT_BYTES = 2
TILE_ROWS = 128  # of FlashAttention 2 with heads of 128: a query that decodes beside a prompt fills one alone


def tables_of(run: Run, profile: Profile, exchange: Path | None) -> Iterator[tuple[str, StepTable]]:
    """Names and tables: as it is, then without one part each, then the shipped machine in place of the profile."""
    padding = Padding(graph_sizes(run.fleet.engine.seats))
    laid = (profile, run.model, run.deployment)
    collective = nothing if run.deployment.devices == 1 else measured(exchange)
    yield "profile", profile_table(*laid, collective, padding)
    if run.deployment.devices > 1:
        yield "without exchange", profile_table(*laid, nothing, padding)
    yield "contexts equally long", profile_table(*laid, collective, padding, skew=False)
    yield "without padding", profile_table(*laid, collective)
    if run.hardware in KERNELS:
        yield "shipped machine", shipped(run, padding)


def nothing(operation: str, bytes_: np.ndarray) -> np.ndarray:
    """An exchange that takes no time."""
    return np.zeros_like(bytes_)


def measured(path: Path | None) -> Collective:
    """The all-reduce of a table; a gather and a scatter are its halves, as of a ring."""
    if path is None or not path.is_file():
        raise InputError(
            f"{path}: no such file; the run has an exchange, so give its measured all-reduce with --exchange"
        )
    columns = read_columns(path)
    of = (columns["num_gpus"] == 2) & (columns["op_name"] == "all_reduce") & (columns["kernel_source"] == GRAPH)
    if not of.any():
        raise InputError(f"{path}: has no all_reduce of 2 GPUs by {GRAPH}; give a table of vLLM's custom all-reduce")
    order = np.argsort(columns["message_size"][of])
    sizes = columns["message_size"][of][order] * ELEMENT_BYTES
    seconds = columns["latency"][of][order] * 1e-3
    return lambda operation, bytes_: onto(sizes, seconds, bytes_) / (1 if operation == "all_reduce" else 2)


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
