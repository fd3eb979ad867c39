"""Memory of each GPU of a deployment: weights, keys and values, and how many sequences fit beside them."""

from dataclasses import dataclass

from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.models import GroupedQueryAttention, MoEModel
from jaxmoe.serving.deployment import Deployment, DeploymentError

WORKSPACE = 4e9  # B of activations, CUDA graphs and communication buffers: assumed


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one GPU; `cache_per_sequence` are keys and values of one sequence of the asked length."""

    capacity: float
    experts: float
    other_weights: float
    workspace: float
    cache_per_sequence: float

    @property
    def free(self) -> float:
        """Bytes left for keys and values; not positive where the weights do not fit."""
        return self.capacity - self.experts - self.other_weights - self.workspace

    @property
    def sequences(self) -> float:
        """Sequences that a data-parallel rank can hold at a time."""
        return max(self.free, 0.0) / self.cache_per_sequence


def memory_of(
    model: MoEModel, deployment: Deployment, capacity: float, context: float | int, copies: float = 1.0
) -> DeviceMemory:
    """DeviceMemory of one GPU of `capacity` usable bytes, for sequences of `context` tokens on average.

    `copies` times the experts are kept. Raises `DeploymentError` where weights leave no room for one sequence.
    """
    expert = model.num_experts * model.expert_parameters * WEIGHT_BYTES[deployment.experts]
    layer = model.shared_expert_parameters * WEIGHT_BYTES[deployment.products]
    router = model.num_experts * model.hidden_size * 2
    sparse, dense = len(model.moe_layer_ids), model.num_dense_layers
    attention = model.num_attention_layers * model.attention_parameters + dense * model.dense_ffn_parameters
    cut = attention * WEIGHT_BYTES[deployment.products] + sparse * layer + model.embedding_parameters * 2
    memory = DeviceMemory(
        capacity=capacity,
        experts=copies * sparse * expert / deployment.devices,
        other_weights=cut / deployment.tensor + sparse * router,
        workspace=WORKSPACE,
        cache_per_sequence=cache_bytes(model, deployment, context),
    )
    if memory.sequences < 1:
        raise DeploymentError(_does_not_fit(model, deployment, memory))
    return memory


def cache_bytes(model: MoEModel, deployment: Deployment, context: float | int) -> float:
    """Keys and values of a sequence on each GPU of its tensor-parallel group, B."""
    attention, width = model.attention, WEIGHT_BYTES[deployment.cache]
    assert attention is not None  # `check_deployment` has refused such a model
    if not isinstance(attention, GroupedQueryAttention):
        return model.num_attention_layers * attention.cache_elements * context * width
    own = attention.cache_elements / min(deployment.tensor, attention.kv_heads)
    pairs = attention.windows(model.num_attention_layers)
    return sum(layers * own * min(context, window or context) for window, layers in pairs) * width


def _does_not_fit(model: MoEModel, deployment: Deployment, memory: DeviceMemory) -> str:
    parts = {"experts": memory.experts, "other weights": memory.other_weights, "workspace": memory.workspace}
    told = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items())
    return (
        f"{model.name} does not fit on {deployment.devices} GPUs of {memory.capacity / 1e9:.1f} usable GB: "
        f"{told}, and {memory.cache_per_sequence / 1e9:.2f} GB for one sequence. Take more GPUs (a larger "
        "deployment.tensor or deployment.data) or narrower weights."
    )
