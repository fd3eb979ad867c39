"""How a model is laid over GPUs: parallelism, precisions and the backend that serves it."""

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.models import GroupedQueryAttention, MoEModel

Overlap = Literal["serial", "two_batches", "shared_beside_dispatch"]
Count = Any
"""A whole number, or in a step that is merged from several layouts an array with those of its rows."""
Exchange = Literal["collectives", "deepep_normal", "deepep_low_latency", "all_to_all", "engine"]
GPUS = 8  # of a node
# Processors of a GPU that an exchange takes while it runs: NCCL's channels (assumed), those of DeepEP's own example,
# and none with a hook.
PROCESSORS: dict[Exchange, int] = {
    "collectives": 24,
    "deepep_normal": 24,
    "deepep_low_latency": 0,
    "all_to_all": 24,
    "engine": 0,
}


class DeploymentError(InputError):
    """A deployment that cannot be, with the nearest that can."""


@dataclass(frozen=True)
class Deployment:
    """Attention in `data` groups of `tensor` GPUs, experts over all of these in `expert_ranks` groups.

    Each group of experts cuts them over `tensor * data / expert_ranks` GPUs. Precisions have the names of measured
    tables: `products` of all weights but the experts', `experts`, and the `cache` of keys and values. `overlap` says
    what runs beside what, `exchange` how tokens get to their experts, and `processors` what of a GPU it takes
    meanwhile, by default that of `PROCESSORS`. `redundant` further copies of experts are kept. A layer more of the
    model drafts so many tokens of each sequence (`drafted`), which the next step verifies.
    """

    backend: str
    tensor: Count = 1
    data: Count = 1
    expert_ranks: Count = 1
    products: str = "bfloat16"
    experts: str = "bfloat16"
    cache: str = "bfloat16"
    overlap: Overlap = "serial"
    exchange: Exchange = "collectives"
    processors: int | None = None
    redundant: int = 0
    drafted: int = 0

    @property
    def queries(self) -> float:
        """Tokens of a decoding sequence that a step verifies: its own and those that are drafted."""
        return 1.0 + self.drafted

    @property
    def held(self) -> int:
        """Processors of a GPU that an exchange takes while it runs."""
        return PROCESSORS[self.exchange] if self.processors is None else self.processors

    @property
    def set_aside(self) -> int:
        """Processors that kernels leave to the exchange all the time: engines do so where two batches take turns."""
        return self.held if self.overlap == "two_batches" else 0

    @property
    def devices(self) -> Count:
        return self.tensor * self.data

    @property
    def expert_tensor(self) -> Count:
        """GPUs that one expert is cut over."""
        return self.devices // self.expert_ranks


def is_one(count: Count) -> bool:
    """Whether all layouts of a step have one of something; an array has the numbers of several layouts."""
    return np.ndim(count) == 0 and bool(count == 1)


def check_attention(model: MoEModel) -> None:
    """Raise `DeploymentError` for a model whose attention is not described."""
    if model.attention is None:
        raise DeploymentError(f"{model.name}: attention is not given, so a step cannot be timed; add attention")
    if model.num_attention_layers < model.num_layers:
        raise DeploymentError(
            f"{model.name}: {model.num_layers - model.num_attention_layers} of its {model.num_layers} layers have "
            "another mixer of tokens than attention, which is not described; take a model with attention in all layers"
        )


def check_deployment(model: MoEModel, deployment: Deployment, domain: int = GPUS) -> None:
    """Raise `DeploymentError` for heads, experts or GPUs that do not divide, naming the nearest that do.

    Fast links join `domain` GPUs.
    """
    check_attention(model)
    assert model.attention is not None
    _divides(model.attention.heads, deployment.tensor, "tensor", f"the {model.attention.heads} heads of {model.name}")
    _divides(deployment.devices, deployment.expert_ranks, "expert_ranks", f"{deployment.devices} GPUs")
    _check_experts(model, deployment)
    _divides(model.expert_size, deployment.expert_tensor, "tensor * data / expert_ranks", "the expert_size")
    if isinstance(model.attention, GroupedQueryAttention):
        heads, cut = model.attention.kv_heads, deployment.tensor
        if heads % cut and cut % heads:
            _divides(heads, cut, "tensor", f"the {heads} KV heads, or a multiple of them")
    _check_exchange(deployment, domain)
    _check_overlap(model, deployment)
    if deployment.backend == "vllm" and deployment.expert_ranks not in (1, deployment.devices):
        raise DeploymentError(
            f"deployment.expert_ranks is {deployment.expert_ranks}; expected 1 or {deployment.devices}, all GPUs, as "
            "vLLM has no other"
        )


def _check_experts(model: MoEModel, deployment: Deployment) -> None:
    """Raise `DeploymentError` for experts and copies of them that ranks cannot have equally many of."""
    experts, ranks, redundant = model.num_experts, deployment.expert_ranks, deployment.redundant
    if (experts + redundant) % ranks == 0:
        return
    if redundant:
        fills = -experts % ranks
        nearest = fills + ranks * max(round((redundant - fills) / ranks), 0)
        raise DeploymentError(
            f"deployment.expert_ranks is {ranks}; expected a divisor of the {experts} experts and {redundant} copies. "
            f"The nearest is deployment.redundant_experts {nearest}."
        )
    both = gcd(experts, deployment.devices)
    _divides(both, ranks, "expert_ranks", f"the {experts} experts and the {deployment.devices} GPUs")


def _check_exchange(deployment: Deployment, domain: int) -> None:
    """Raise `DeploymentError` for an exchange that cannot be between these GPUs."""
    if deployment.exchange != "collectives" and deployment.expert_ranks < deployment.devices:
        raise DeploymentError(
            f"deployment.exchange is {deployment.exchange}, which takes tokens to whole experts, but expert_ranks is "
            f"{deployment.expert_ranks}; expected {deployment.devices}, all GPUs, or exchange collectives"
        )
    if deployment.exchange == "deepep_normal" and deployment.held < 2:
        raise DeploymentError(
            f"deployment.processors is {deployment.held}; expected at least 2, a channel of deepep_normal, or "
            "deepep_low_latency, which takes none"
        )
    if deployment.exchange == "all_to_all":
        if deployment.backend != "trtllm":
            raise DeploymentError(
                f"deployment.exchange is all_to_all, which {deployment.backend} does not have; take deepep_low_latency"
            )
        if deployment.devices > domain:
            raise DeploymentError(
                f"deployment.exchange is all_to_all on {deployment.devices} GPUs; expected at most {domain}, which "
                "one domain of links joins"
            )
    elif deployment.exchange != "collectives" and deployment.devices > domain and deployment.devices % domain:
        raise DeploymentError(
            f"deployment.exchange is {deployment.exchange} on {deployment.devices} GPUs; expected a multiple of "
            f"{domain}, whole domains of links"
        )


def _check_overlap(model: MoEModel, deployment: Deployment) -> None:
    """Raise `DeploymentError` for an overlap of what is not there."""
    if deployment.backend == "trtllm" and deployment.overlap == "two_batches":
        raise DeploymentError("deployment.overlap is two_batches, which TensorRT-LLM does not have; take serial")
    if deployment.overlap != "shared_beside_dispatch":
        return
    if model.shared_experts is None:
        raise DeploymentError(
            f"deployment.overlap is shared_beside_dispatch, but {model.name} has no shared experts; take serial"
        )
    if deployment.data == 1 and deployment.exchange == "collectives":
        raise DeploymentError(
            "deployment.overlap is shared_beside_dispatch, but with deployment.data 1 every GPU has all tokens and "
            "none are dispatched; take serial, or data-parallel attention"
        )


def _divides(whole: int, parts: int, key: str, what: str) -> None:
    if parts >= 1 and whole % parts == 0:
        return
    fits = [count for count in range(1, whole + 1) if whole % count == 0]
    nearest = min(fits, key=lambda count: (abs(count - parts), -count))
    raise DeploymentError(f"deployment.{key} is {parts}; expected a divisor of {what}. The nearest is {nearest}.")
