"""Memory of each GPU of a deployment: weights, keys and values, and how many sequences fit beside them."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.models import GroupedQueryAttention, MoEModel
from jaxmoe.serving.deployment import Deployment, DeploymentError, check_deployment

WORKSPACE = 4e9  # B of activations, CUDA graphs and communication buffers: assumed
MOST_DOUBLINGS = 5  # of the number of GPUs, for a layout that fits


class DoesNotFitError(DeploymentError):
    """Weights that leave no room for a sequence."""


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

    `copies` times the experts are kept. Raises `DoesNotFitError` where weights leave no room for one sequence, with
    what takes the room and the nearest layout that leaves some.
    """
    memory = _counted(model, deployment, capacity, context, copies)
    if memory.sequences < 1:
        nearest = next(_layouts_that_fit(model, deployment, capacity, context, copies), None)
        what = f"{model.name} does not fit on {deployment.devices} GPUs"
        remedy = _remedy(nearest, _longest(model, deployment, capacity, context, copies))
        raise DoesNotFitError(does_not_fit(what, memory, remedy))
    return memory


def _counted(
    model: MoEModel, deployment: Deployment, capacity: float, context: float | int, copies: float
) -> DeviceMemory:
    cache = cache_bytes(model, deployment, context)
    model = with_draft(model, deployment.drafted)
    expert = model.num_experts * model.expert_parameters * WEIGHT_BYTES[deployment.experts]
    layer = model.shared_expert_parameters * WEIGHT_BYTES[deployment.products]
    router = model.num_experts * model.hidden_size * 2
    sparse, dense = len(model.moe_layer_ids), model.num_dense_layers
    attention = model.num_attention_layers * model.attention_parameters + dense * model.dense_ffn_parameters
    cut = attention * WEIGHT_BYTES[deployment.products] + sparse * layer + model.embedding_parameters * 2
    return DeviceMemory(
        capacity=capacity,
        experts=copies * sparse * expert / deployment.devices,
        other_weights=cut / deployment.tensor + sparse * router,
        workspace=WORKSPACE,
        cache_per_sequence=cache,
    )


def with_draft(model: MoEModel, drafted: int) -> MoEModel:
    """The model as memory holds it, with the layer that drafts tokens where any are drafted."""
    return model.with_draft_layer() if drafted else model


def _layouts_that_fit(
    model: MoEModel, deployment: Deployment, capacity: float, context: float | int, copies: float
) -> Iterator[Deployment]:
    """Layouts with room for a sequence, of as few GPUs as can be from its own number on, by twos."""
    for devices in (deployment.devices * 2**power for power in range(MOST_DOUBLINGS + 1)):
        for tensor in (count for count in range(devices, 0, -1) if devices % count == 0):
            for ranks in dict.fromkeys((deployment.expert_ranks, devices, 1)):
                other = replace(deployment, tensor=tensor, data=devices // tensor, expert_ranks=ranks)
                try:
                    check_deployment(model, other)
                except DeploymentError:
                    continue
                if _counted(model, other, capacity, context, copies).sequences >= 1:
                    yield other


def cache_bytes(model: MoEModel, deployment: Deployment, context: float | int) -> float:
    """Keys and values of a sequence on each GPU of its tensor-parallel group, B."""
    model = with_draft(model, deployment.drafted)
    attention, width = model.attention, WEIGHT_BYTES[deployment.cache]
    assert attention is not None  # `check_deployment` has refused such a model
    if not isinstance(attention, GroupedQueryAttention):
        return model.num_attention_layers * attention.cache_elements * context * width
    own = attention.cache_elements / min(deployment.tensor, attention.kv_heads)
    pairs = attention.windows(model.num_attention_layers)
    return sum(layers * own * min(context, window or context) for window, layers in pairs) * width


def _longest(model: MoEModel, deployment: Deployment, capacity: float, context: float | int, copies: float) -> int:
    """Tokens of the longest sequence that a layout has room for; 0 for none."""

    def lacks(tokens: int) -> bool:
        return _counted(model, deployment, capacity, tokens, copies).sequences < 1

    return bisect_left(range(1, int(context) + 1), True, key=lacks)


def _remedy(nearest: Deployment | None, longest: int) -> str:
    shorter = f"sequences of {longest:,} tokens on average, which fit here" if longest else "shorter sequences"
    if nearest is None:
        return f"Take narrower weights or {shorter}."
    return (
        f"It fits with deployment.tensor {nearest.tensor}, data {nearest.data} and expert_ranks "
        f"{nearest.expert_ranks}, on {nearest.devices} GPUs; or take narrower weights"
        f"{f' or {shorter}' if longest else ''}."
    )


def does_not_fit(what: str, memory: DeviceMemory, remedy: str) -> str:
    """The message of a `DoesNotFitError`, with what takes the room."""
    parts = {"experts": memory.experts, "other weights": memory.other_weights, "workspace": memory.workspace}
    told = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items())
    usable, sequence = memory.capacity / 1e9, memory.cache_per_sequence / 1e9
    return f"{what} of {usable:.1f} usable GB: {told}, and {sequence:.2f} GB for one sequence. {remedy}"
