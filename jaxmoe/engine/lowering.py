"""From tokens to stages: dispatch, compute and combine of a batch whose tokens visit the hosts of their experts."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import AbstractDemand, InTurn, Products, Steps, Traffic, Work
from jaxmoe.engine.stage import Stage
from jaxmoe.hardware import AbstractTopology
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, AbstractTimeModel, Phases, Visits
from jaxmoe.network.flows import Rounds
from jaxmoe.relax import AbstractSupport

Number = int | float | Float[Array, ""]  # an array where JAX traces it


class LayerCosts(eqx.Module):
    """Sizes from which the cost of a layer follows: bytes of a vector and of an expert, FLOPs, and GEMM shapes."""

    combine_bytes: Float[Array, ""]  # B: one hidden vector as combine sends it
    dispatch_bytes: Float[Array, ""]  # B: one as dispatch sends it, with its metadata
    expert_bytes: Float[Array, ""]  # B: weights of one expert
    flops_per_token_expert: Float[Array, ""]
    columns: Float[Array, ""]  # intermediate size of an expert
    gemms: Float[Array, ""]  # products that an expert's FFN takes

    @classmethod
    def of(
        cls,
        moe: MoEModel,
        *,
        dispatch_bytes_per_element: Number,
        combine_bytes_per_element: Number,
        weight_bytes_per_element: Number,
        metadata_bytes_per_choice: Number = 0.0,
        products: int = 3,
    ) -> "LayerCosts":
        """Costs of a model's layer at so many bytes of each number.

        An expert's FFN takes `products` products of hidden times intermediate size: 3 where it is gated (6 h i FLOPs of
        a token), 1 as hd_moe counts them (2 h i).
        """
        numbers = (
            moe.hidden_size * combine_bytes_per_element,
            moe.hidden_size * dispatch_bytes_per_element + moe.top_k * metadata_bytes_per_choice,
            moe.expert_parameters * weight_bytes_per_element,
            2 * products * moe.hidden_size * moe.expert_size,
            moe.expert_size,
            products,
        )
        return cls(*(jnp.asarray(number, jnp.float32) for number in numbers))

    def products(
        self, rows: Float[Array, "copy node"], part: Float[Array, "copy node"], present: Float[Array, "copy node"]
    ) -> Products:
        """Products of so many rows through parts of experts."""
        return Products(rows, part, present, self.flops_per_token_expert, self.columns, self.gemms)

    def work(
        self,
        rows: Float[Array, " node"],
        read: Float[Array, " node"],
        vectors: Float[Array, " node"],
        products: Products | None = None,
    ) -> Work:
        """Work of nodes that compute so many choices, read so many experts and move so many vectors in and out."""
        return Work(
            flops=rows * self.flops_per_token_expert,
            weights=read * self.expert_bytes,
            vectors=vectors * (self.dispatch_bytes + self.combine_bytes),
            products=products,
        )


def expert_work(visits: Visits, costs: LayerCosts, support: AbstractSupport) -> Work:
    """Work of every node for a batch: FLOPs, bytes of weights and vectors, and matrix products.

    `support` decides which nodes compute an expert at all: 0 or 1, or a number between when it is relaxed.
    """
    present = support.presence(support.amount(visits.part)) * jnp.minimum(visits.rows, 1)
    products = costs.products(visits.rows, visits.part, present)
    return costs.work(visits.work, visits.read, visits.weight @ visits.visited, products)


def lower_tokens(
    exchange: AbstractExchange,
    topology: AbstractTopology,
    visits: Visits,
    costs: LayerCosts,
    times: AbstractTimeModel,
    support: AbstractSupport,
) -> tuple[Stage, Stage, Stage]:
    """Dispatch, compute and combine of visits under an exchange; combine is what it describes, dispatch its mirror.

    What deciding takes comes before the hidden vectors, as part of dispatch.
    """
    sent, asked = exchange(topology, visits), exchange.deciding(topology, visits)
    dispatch = _demand(sent, costs.dispatch_bytes, times, mirrored=True)
    if asked is not None:
        dispatch = InTurn((_demand(asked, jnp.ones(()), times), dispatch))
    compute, combine = expert_work(visits, costs, support), _demand(sent, costs.combine_bytes, times)
    return Stage("dispatch", dispatch), Stage("compute", compute), Stage("combine", combine)


def _demand(
    sent: Phases | Rounds, unit: Float[Array, ""], times: AbstractTimeModel, mirrored: bool = False
) -> AbstractDemand:
    """The demand of traffic whose amounts are of `unit` bytes each."""
    if isinstance(sent, Rounds):
        return Steps(sent, unit, times, mirrored)
    return Traffic(sent[::-1] if mirrored else sent, unit, times, mirrored)
