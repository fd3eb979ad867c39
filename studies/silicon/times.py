"""Seconds of kernels for measured systems: everything about a row that no constant changes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from rows import DENSE, MODELS, Measured, deployment_of, requests_in_flight

from jaxmoe.config import load_model
from jaxmoe.config.files import find_kernels
from jaxmoe.config.model import build_model
from jaxmoe.hardware.gpu.files import KernelFile, KernelFileError, KnownKernel, at_sheet, read_kernels
from jaxmoe.hardware.gpu.kernel import Base, FittedKernel
from jaxmoe.models import MoEModel
from jaxmoe.serving.closed_loop import BACKENDS, Backend, Loop, Users, loop_of
from jaxmoe.serving.deployment import Deployment, DeploymentError
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.memory import memory_of
from jaxmoe.serving.step import ModelStep

# Usable memory of a GPU, B, and whose kernels stand in where none were measured, by data sheet.
MEMORY = {"h100_sxm": 80e9, "h200_sxm": 141e9, "b200_sxm": 180e9, "b300_sxm": 270e9, "gb200": 186e9, "gb300": 279e9}
LIKE = {"b300_sxm": "b200_sxm", "gb300": "gb200"}
LENGTHS = 0.9  # of the stated lengths on average: public benchmarks draw them from 0.8 to 1 times what they state
PADDED = 64  # rows at a time, so that few shapes are compiled
TIGHT = 4.0  # sequences of a rank where weights leave no room by our count, but the system ran


class RowTimes(NamedTuple):
    """A row with what its requests meet in the closed loop before constants; `loop` is of that row alone."""

    row: Measured
    loop: Loop


def row_times(rows: Sequence[Measured], roofline: bool = False) -> list[RowTimes]:
    """Kernel times of all rows, in the order of their deployments; with `roofline`, by the data sheet alone."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.pair, deployment_of(row.columns)].append(row)
    found: list[RowTimes] = []
    for (pair, deployment), some in groups.items():
        try:
            found += _of_group(pair, deployment, some, roofline)
        except (DeploymentError, KernelFileError) as error:  # their times are no number, and an error of 100 %
            print(f"{len(some)} rows are not covered: {' on '.join(pair)}: {error}")
            found += [RowTimes(row, Loop(*[math.nan] * len(Loop._fields))) for row in some]
    return found


def _of_group(
    pair: tuple[str, str], deployment: Deployment, rows: list[Measured], roofline: bool
) -> Iterable[RowTimes]:
    model, system = model_of(pair[0]), pair[1]
    backend = BACKENDS[deployment.backend]
    kernels = Kernels(kernels_of(system, roofline), deployment.backend)
    step = ModelStep(model, deployment, kernels, expert_loads(model.num_experts, model.top_k, deployment.expert_ranks))
    for start in range(0, len(rows), PADDED):
        some = rows[start : start + PADDED]
        users = Users(
            _padded(requests_in_flight(some, deployment)),
            _padded([LENGTHS * float(row.columns["isl"]) for row in some]),
            _padded([LENGTHS * float(row.columns["osl"]) for row in some]),
        )
        room = [_sequences(model, deployment, memory_part(system, backend), row) for row in some]
        loop = loop_of(step, users, _padded(room), backend)
        for at, row in enumerate(some):
            one = Loop(*(np.broadcast_to(np.asarray(each), (PADDED,))[at] for each in loop))
            yield RowTimes(row, one)


def memory_part(system: str, backend: Backend) -> float:
    """Bytes of a GPU that a backend takes. Raises `KernelFileError` for a system that is not known."""
    if system not in MEMORY:
        raise KernelFileError(f"{system}: its memory is not known; known are {', '.join(MEMORY)}")
    return MEMORY[system] * backend.memory_part


def _padded(values: Sequence[float]) -> jnp.ndarray:
    return jnp.asarray([*values, *[values[-1]] * (PADDED - len(values))], jnp.float32)


def _sequences(model: MoEModel, deployment: Deployment, usable: float, row: Measured) -> float:
    context = LENGTHS * (float(row.columns["isl"]) + float(row.columns["osl"]) / 2)
    try:
        return memory_of(model, deployment, usable, context).sequences
    except DeploymentError:
        return TIGHT


@cache
def model_of(path: str) -> MoEModel:
    """The model of a row."""
    if path in DENSE:
        return DENSE[path]
    return build_model(load_model(MODELS[path], "model_path"))


def path_of(system: str) -> Path:
    """The file of the kernels that a system has."""
    return find_kernels(f"kernels/{LIKE.get(system, system)}.json")


@cache
def kernels_of(system: str, roofline: bool) -> KernelFile:
    """The kernels of a system, or of one like it at its data sheet; with `roofline`, each at the sheet's rates."""
    file = at_sheet(read_kernels(path_of(system)), system)
    if not roofline:
        return file
    return replace(file, kernels=tuple(map(_at_data_sheet, file.kernels)))


def _at_data_sheet(kernel: KnownKernel) -> KnownKernel:
    base = kernel.fitted.base
    ideal = Base(
        launch=jnp.full_like(base.launch, -30.0),
        moved=jnp.zeros_like(base.moved),
        filled=jnp.zeros_like(base.filled),
        wave=jnp.full_like(base.wave, -30.0),
        overlap=jnp.full_like(base.overlap, 30.0),
    )
    return replace(kernel, fitted=FittedKernel(ideal))
