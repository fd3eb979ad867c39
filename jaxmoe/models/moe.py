"""What a Mixture-of-Experts model is made of, as far as its experts' time and memory depend on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoEModel:
    """Sizes of a model. `moe_layer_ids` are the layers with routed experts, as numbered in the full model."""

    name: str
    hidden_size: int
    expert_size: int  # intermediate size of one routed expert
    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]

    @property
    def expert_parameters(self) -> int:
        """Weights of one gated expert: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_size
