"""Measured systems that read prompts on other GPUs than they decode on: time to first token and per token.

Workers of both kinds are those of a row. Prompts wait for a worker's data-parallel rank that reads them (M/D/1), then
decode with as many others as there are. Requests in flight are reading or decoding (Little), which tells their rate.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from rows import Measured, deployment_of
from times import LENGTHS, PADDED, kernels_of, model_of, path_of

from jaxmoe.hardware.gpu.deepep_files import beside, read_exchanges
from jaxmoe.hardware.gpu.files import KernelFileError
from jaxmoe.hardware.gpu.sheet import Sheet
from jaxmoe.models import MoEModel
from jaxmoe.serving.closed_loop import BACKENDS, Overheads
from jaxmoe.serving.deployment import Deployment, DeploymentError
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.step import ModelStep, StepLoad

KINDS = ("prefill", "decode")
ROUNDS = 6  # of requests that decode by the time per token, and back
REQUESTS = 10.0  # of a user
NARROWEST = 128  # columns of a part of an expert: weights in FP8 have a scale for so many


class Workers(NamedTuple):
    """How many workers of a kind a row has, and the deployment of each."""

    count: int
    deployment: Deployment

    @property
    def ranks(self) -> int:
        return self.count * self.deployment.data


def has_workers(row: Measured) -> bool:
    """Whether a row says how many workers it has, and requests in flight."""
    return row.concurrency is not None and all(row.columns[f"{kind}_num_workers"] for kind in KINDS)


def workers_of(row: Measured, kind: str) -> Workers:
    """Workers of a kind."""
    prefix = f"{kind}_"
    own = {name.removeprefix(prefix): value for name, value in row.columns.items() if name.startswith(prefix)}
    return Workers(int(own["num_workers"]), deployment_of(row.columns | own))


def told_apart(rows: Sequence[Measured], overheads: dict[str, Overheads]) -> np.ndarray:
    """Seconds to the first token and per token, [row, 2]; nan where a row is not covered, whose reason is printed."""
    found = np.full((len(rows), 2), np.nan)
    groups = defaultdict(list)
    for at, row in enumerate(rows):
        groups[row.pair, *(workers_of(row, kind) for kind in KINDS)].append(at)
    for (pair, *workers), some in groups.items():
        try:
            steps = [_step(pair, kind, each.deployment) for kind, each in zip(KINDS, workers, strict=True)]
            for start in range(0, len(some), PADDED):
                at = some[start : start + PADDED]
                own = overheads[workers[0].deployment.backend]
                found[at] = _served([rows[each] for each in at], workers, steps, own)
        except (DeploymentError, KernelFileError) as error:
            print(f"{len(some)} rows are not covered: {' on '.join(pair)}: {error}")
    return found


def _step(pair: tuple[str, str], kind: str, deployment: Deployment) -> ModelStep:
    model, kernels = model_of(pair[0]), Kernels(kernels_of(pair[1], False), deployment.backend)
    deployment = as_engines_do(model, kind, deployment, kernels.sheet)
    path = beside(path_of(pair[1]))
    deepep = read_exchanges(path) if path.exists() else None
    loads = expert_loads(model.num_experts, model.top_k, deployment.expert_ranks)
    return ModelStep(model, deployment, kernels, loads, deepep)


def as_engines_do(model: MoEModel, kind: str, deployment: Deployment, sheet: Sheet) -> Deployment:
    """The deployment with what engines do where links join several nodes, which rows do not name.

    Experts are not cut below `NARROWEST` columns: these rows have them apart. With data-parallel attention and all
    experts apart, SGLang takes DeepEP, and TensorRT-LLM its all-to-all from more ranks than choices of a token on.
    """
    if sheet.domain == sheet.node or deployment.data == 1:
        return deployment
    if model.expert_size < NARROWEST * deployment.expert_tensor:
        deployment = replace(deployment, expert_ranks=deployment.devices)
    ranks = deployment.expert_ranks
    if ranks < deployment.devices:
        return deployment
    if deployment.backend == "trtllm" and ranks > model.top_k:
        return replace(deployment, exchange="all_to_all")
    if deployment.backend == "sglang":
        return replace(deployment, exchange="deepep_low_latency" if kind == "decode" else "deepep_normal")
    return deployment


def _served(rows: list[Measured], workers: list[Workers], steps: list[ModelStep], overheads: Overheads) -> np.ndarray:
    (readers, decoders), (reading, decoding) = workers, steps
    users, prompt, output = (
        np.resize(values, PADDED)
        for values in (
            [float(row.concurrency or 0) for row in rows],
            [LENGTHS * float(row.columns["isl"]) for row in rows],
            [LENGTHS * float(row.columns["osl"]) for row in rows],
        )
    )
    chunk = np.minimum(BACKENDS[readers.deployment.backend].chunk_of_rank(readers.deployment.data), prompt)
    each = reading.seconds(StepLoad(jnp.zeros(PADDED), 1.0, jnp.asarray(chunk), jnp.asarray(prompt)))
    read = prompt / chunk * (np.asarray(each) * float(overheads.prompts) + float(overheads.step))
    context, active, first = prompt + output / 2, users, read
    per_token = np.zeros(PADDED)
    for _ in range(ROUNDS):
        load = StepLoad(jnp.asarray(np.maximum(active / decoders.ranks, 1.0)), jnp.asarray(context))
        per_token = np.asarray(decoding.seconds(load)) + float(overheads.step)
        rate = _rate(users, output * per_token, read, readers.ranks)
        first = users / rate - output * per_token
        active = rate * output * per_token
    burst = np.maximum(users / readers.ranks - 1, 0.0) / 2 * read / REQUESTS
    return np.stack([first + burst + float(overheads.request), per_token], axis=-1)[: len(rows)]


def _rate(users: np.ndarray, decode: np.ndarray, read: np.ndarray, ranks: int) -> np.ndarray:
    """Requests a second at which so many `users` are reading or decoding: by halving, below what readers can do."""
    low, high = np.zeros_like(users), ranks / read
    for _ in range(50):
        rate = (low + high) / 2
        busy = rate * read / ranks
        waiting = rate * (decode + read + busy / (2 * (1 - busy)) * read)
        low, high = np.where(waiting < users, rate, low), np.where(waiting < users, high, rate)
    return low
