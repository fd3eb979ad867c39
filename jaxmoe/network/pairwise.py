"""The all-to-all of a MoE layer in its three stages, each priced by a time model of its own (camoe 3.2, Eq. 9)."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.exchange import StageTime
from jaxmoe.network.profile import STAGES
from jaxmoe.network.time_models import AbstractTimeModel
from jaxmoe.relax import AbstractReduction, HardMax


class AllToAll(eqx.Module):
    """Metadata from every node to every other, then vectors to their experts, then results back.

    With `AlphaBeta` for every stage this is Eq. 9 of camoe, each stage as long as its slowest pair; any other time
    model prices the same traffic. Combine is the transpose of dispatch (Eq. 11). A pair that sends nothing costs
    nothing, where Eq. 9 has its alpha.
    """

    models: dict[str, AbstractTimeModel]  # by stage
    metadata_bytes: Float[Array, ""]  # B from every node to every other: counts of tokens for each expert
    dispatch_bytes: Float[Array, ""]  # B of one copy with its routing probability
    combine_bytes: Float[Array, ""]  # B of one result

    def traffic(self, copies: Float[Array, "node node2"]) -> dict[str, Float[Array, "node node2"]]:
        """Bytes [source, destination] of every stage, for copies of vectors [source, node of the expert]."""
        return {
            "metadata": jnp.full_like(copies, 1) * self.metadata_bytes * (1 - jnp.eye(len(copies), dtype=copies.dtype)),
            "dispatch": copies * self.dispatch_bytes,
            "combine": copies.T * self.combine_bytes,
        }

    def stages(self, topology: AbstractTopology, copies: Float[Array, "node node2"]) -> dict[str, StageTime]:
        """How long every stage keeps the network, for copies of vectors [source, node of the expert]."""
        traffic = self.traffic(copies)
        return {name: self.models[name](topology, traffic[name]) for name in STAGES}

    def seconds(
        self,
        topology: AbstractTopology,
        copies: Float[Array, "node node2"],
        reduction: AbstractReduction | None = None,
    ) -> dict[str, Float[Array, ""]]:
        """Seconds of every stage. Exact without a `reduction`."""
        reduction = HardMax() if reduction is None else reduction
        return {name: stage.total(reduction) for name, stage in self.stages(topology, copies).items()}

    def total(
        self,
        topology: AbstractTopology,
        copies: Float[Array, "node node2"],
        reduction: AbstractReduction | None = None,
    ) -> Float[Array, ""]:
        """Seconds of all stages, one after the other."""
        return jnp.stack([*self.seconds(topology, copies, reduction).values()]).sum()


def same_models(model: AbstractTimeModel) -> dict[str, AbstractTimeModel]:
    """One time model for all stages."""
    return dict.fromkeys(STAGES, model)
