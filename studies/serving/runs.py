"""Recorded runs of vLLM in the layout of LLMServingSim's bench: what was asked of the engine, and what users waited."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from models import model_of

from jaxmoe.errors import InputError
from jaxmoe.models import MoEModel
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.memory import WORKSPACE, cache_bytes, memory_of
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.requests import Requests

GIBI = 2**30
TOKENS_OF_BLOCK = 16  # vLLM's
NOT_KV = 1.2e9  # B of activations, graphs and libraries beside the weights: assumed


class Waited(NamedTuple):
    """Seconds of each request, from when the engine took it into its queue."""

    first_token: Float[np.ndarray, " R"]
    per_token: Float[np.ndarray, " R"]  # after the first
    latency: Float[np.ndarray, " R"]


@dataclass(frozen=True, eq=False)
class Run:
    """A run: `requests` with their arrivals, what its users waited, and the errors of LLMServingSim's own simulation.

    Of a dense model, data-parallel ranks are engines apart; those of one with experts step together.
    """

    name: str
    model: MoEModel
    deployment: Deployment  # of one engine
    fleet: Fleet
    hardware: str
    version: str  # of vLLM
    requests: Requests
    waited: Waited
    theirs: Mapping[tuple[str, str], float]  # by metric and statistic


def read_run(folder: Path, config: Path | None = None) -> Run:
    """The run of a folder with `vllm/meta.json`, `vllm/requests.jsonl` and `config.json`.

    `config` is the config.json of a model that is not known by its name. Raises `InputError` for what is missing.
    """
    meta, cluster = _json(folder / "vllm" / "meta.json"), _json(folder / "config.json")
    asked = _of(meta, "engine_kwargs", folder)
    model = model_of(str(_of(meta, "model", folder)), config)
    data, tensor = int(asked.get("data_parallel_size") or 1), int(asked.get("tensor_parallel_size") or 1)
    ranks = data if model.moe_layer_ids else 1
    deployment = Deployment(
        "vllm", tensor, ranks, tensor * ranks if model.moe_layer_ids and asked.get("enable_expert_parallel") else 1
    )
    instance = _instance(cluster, folder)
    blocks = _blocks(meta, instance, model, deployment)
    engine = Engine(
        token_budget=_size(meta, "max_num_batched_tokens", folder),
        seats=_size(meta, "max_num_seqs", folder),
        ranks=ranks,
        kv_blocks=blocks,
        block_tokens=TOKENS_OF_BLOCK,
        prefix_cache=True,  # of requests that lost their blocks: prompts share none
        lookahead=True,
    )
    requests, waited = _requests(folder / "vllm" / "requests.jsonl")
    return Run(
        name=folder.name,
        model=model,
        deployment=deployment,
        fleet=Fleet(engine, data // ranks, "least_loaded"),
        hardware=str(instance.get("hardware", "")),
        version=str(_of(meta, "vllm_version", folder)),
        requests=requests,
        waited=waited,
        theirs=_theirs(folder / "validation" / "summary.txt"),
    )


def waited(queued: np.ndarray, first: np.ndarray, last: np.ndarray, output: np.ndarray) -> Waited:
    """Waiting times by three moments of each request and its tokens."""
    return Waited(first - queued, (last - first) / np.maximum(output - 1, 1), last - queued)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a recorded run has it") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); get the run again") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds a {type(found).__name__}; expected an object")
    return found


def _of(found: Mapping[str, Any], key: str, folder: Path) -> Any:
    if found.get(key) is None:
        raise InputError(f"{folder / 'vllm' / 'meta.json'}: has no {key}; expected what the run was started with")
    return found[key]


def _size(meta: Mapping[str, Any], key: str, folder: Path) -> int:
    """A setting of the scheduler: as asked, or as vLLM resolved it."""
    resolved = (meta.get("resolved_config") or {}).get("scheduler_config") or {}
    stated = meta["engine_kwargs"].get(key)
    return int(_of({key: resolved.get(key) if stated is None else stated}, key, folder))


def _instance(cluster: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    try:
        return dict(cluster["nodes"][0]["instances"][0])
    except (KeyError, IndexError, TypeError):
        raise InputError(f"{folder / 'config.json'}: has no nodes[0].instances[0]; expected the cluster") from None


def _blocks(
    meta: Mapping[str, Any], instance: Mapping[str, Any], model: MoEModel, deployment: Deployment
) -> int | None:
    """KV blocks of a rank: as vLLM counted them, else of the memory beside the weights; none where neither is told."""
    counted = (meta.get("kv_cache") or {}).get("num_gpu_blocks")
    memory = instance.get("npu_mem") or {}
    if counted or "mem_size" not in memory:
        return int(counted) if counted else None
    usable = float(memory["mem_size"]) * GIBI * float(memory.get("mem_util", 0.9)) - NOT_KV
    room = memory_of(model, deployment, usable + WORKSPACE, TOKENS_OF_BLOCK).free
    return int(room / cache_bytes(model, deployment, TOKENS_OF_BLOCK))


def _requests(path: Path) -> tuple[Requests, Waited]:
    """Requests in the order of their arrival, whose clock is set to the engine's by the request it took soonest."""
    names = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        table = np.array([[row[name] for name in names] for row in rows], float)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a recorded run has it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: a row is not as expected ({error}); expected {', '.join(names)}") from None
    if not len(table) or not np.isfinite(table).all():
        raise InputError(f"{path}: a request was not answered, or there is none; leave out those without times")
    prompt, output, arrival, queued, first, last = table[np.argsort(table[:, 2], kind="stable")].T
    arrival = arrival + (queued - arrival).min()
    return (
        Requests(arrival - arrival[0], prompt.astype(int), output.astype(int)),
        waited(queued, first, last, output),
    )


def _theirs(path: Path) -> dict[tuple[str, str], float]:
    """Errors of LLMServingSim by metric and statistic, as fractions; none where the run has no summary."""
    if not path.is_file():
        return {}
    line = re.compile(r"^(TTFT|TPOT|Latency) (\w+) .*?([+-][\d.]+)%", re.MULTILINE)
    return {(m.lower(), s.lower()): float(error) / 100 for m, s, error in line.findall(path.read_text())}
