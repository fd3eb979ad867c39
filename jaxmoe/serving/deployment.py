"""How a model is laid over GPUs: parallelism, precisions and the backend that serves it."""

from dataclasses import dataclass

from jaxmoe.errors import InputError
from jaxmoe.models import GroupedQueryAttention, MoEModel


class DeploymentError(InputError):
    """A deployment that cannot be, with the nearest that can."""


@dataclass(frozen=True)
class Deployment:
    """Attention in `data` groups of `tensor` GPUs, experts over all of these in `expert_ranks` groups.

    Each group of experts cuts them over `tensor * data / expert_ranks` GPUs. Precisions have the names of measured
    tables: `products` of all weights but the experts', `experts`, and the `cache` of keys and values.
    """

    backend: str
    tensor: int = 1
    data: int = 1
    expert_ranks: int = 1
    products: str = "bfloat16"
    experts: str = "bfloat16"
    cache: str = "bfloat16"

    @property
    def devices(self) -> int:
        return self.tensor * self.data

    @property
    def expert_tensor(self) -> int:
        """GPUs that one expert is cut over."""
        return self.devices // self.expert_ranks


def check_deployment(model: MoEModel, deployment: Deployment) -> None:
    """Raise `DeploymentError` for heads, experts or GPUs that do not divide, naming the nearest that do."""
    if model.attention is None:
        raise DeploymentError(f"{model.name}: attention is not given, so a step cannot be timed; add attention")
    if model.num_attention_layers < model.num_layers:
        raise DeploymentError(
            f"{model.name}: {model.num_layers - model.num_attention_layers} of its {model.num_layers} layers have "
            "another mixer of tokens than attention, which is not described; take a model with attention in all layers"
        )
    _divides(model.attention.heads, deployment.tensor, "tensor", f"the {model.attention.heads} heads of {model.name}")
    _divides(deployment.devices, deployment.expert_ranks, "expert_ranks", f"{deployment.devices} GPUs")
    _divides(model.num_experts, deployment.expert_ranks, "expert_ranks", f"the {model.num_experts} experts")
    _divides(model.expert_size, deployment.expert_tensor, "tensor * data / expert_ranks", "the expert_size")
    if isinstance(model.attention, GroupedQueryAttention):
        heads, cut = model.attention.kv_heads, deployment.tensor
        if heads % cut and cut % heads:
            _divides(heads, cut, "tensor", f"the {heads} KV heads, or a multiple of them")
    if deployment.backend == "vllm" and deployment.expert_ranks not in (1, deployment.devices):
        raise DeploymentError(
            f"deployment.expert_ranks is {deployment.expert_ranks}; expected 1 or {deployment.devices}, all GPUs, as "
            "vLLM has no other"
        )


def _divides(whole: int, parts: int, key: str, what: str) -> None:
    if parts >= 1 and whole % parts == 0:
        return
    fits = [count for count in range(1, whole + 1) if whole % count == 0]
    nearest = min(fits, key=lambda count: (abs(count - parts), -count))
    raise DeploymentError(f"deployment.{key} is {parts}; expected a divisor of {what}. The nearest is {nearest}.")
