"""From tokens to stages: dispatch, compute and combine of a batch whose tokens visit the hosts of their experts."""

from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import AbstractDemand, Fixed, InTurn, Products, Steps, Traffic, Work
from jaxmoe.engine.serving import AbstractServing
from jaxmoe.engine.stage import Stage
from jaxmoe.hardware import AbstractTopology
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, AbstractTimeModel, Flows, Phases, Visits
from jaxmoe.network.flows import Rounds
from jaxmoe.relax import AbstractSupport

Number = int | float | Float[Array, ""]  # an array where JAX traces it


class Deciding(eqx.Module):
    """Costs of rules that have to know the batch: of choices in turn, and of nodes that tell each other of tokens."""

    choice_seconds: Float[Array, ""]  # s: one choice
    told_bytes: Float[Array, ""]  # B: what tells every node of one token


class LayerCosts(eqx.Module):
    """Sizes from which the cost of a layer follows: bytes of a vector and of an expert, FLOPs, and GEMM shapes."""

    combine_bytes: Float[Array, ""]  # B: one hidden vector as combine sends it
    dispatch_bytes: Float[Array, ""]  # B: one as dispatch sends it, with its metadata
    expert_bytes: Float[Array, ""]  # B: weights of one expert
    flops_per_token_expert: Float[Array, ""]
    columns: Float[Array, ""]  # intermediate size of an expert
    gemms: Float[Array, ""]  # products that an expert's FFN takes
    deciding: Deciding | None = None  # `None`: free

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
        deciding: Deciding | None = None,
    ) -> "LayerCosts":
        """Costs of a model's layer at so many bytes of each number.

        An expert's FFN takes `products` products of hidden times intermediate size: 3 where it is gated (6 h i FLOPs of
        a token), 1 as hd_moe counts them (2 h i).
        """
        dispatched = moe.hidden_size * dispatch_bytes_per_element + moe.top_k * metadata_bytes_per_choice
        return cls(
            combine_bytes=_number(moe.hidden_size * combine_bytes_per_element),
            dispatch_bytes=_number(dispatched),
            expert_bytes=_number(moe.expert_parameters * weight_bytes_per_element),
            flops_per_token_expert=_number(2 * products * moe.hidden_size * moe.expert_size),
            columns=_number(moe.expert_size),
            gemms=_number(products),
            deciding=deciding,
        )

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


def _number(value: Number) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)


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
    serving: AbstractServing | None = None,
) -> tuple[Stage, Stage, Stage]:
    """Dispatch, compute and combine of visits under an exchange; combine is what it describes, dispatch its mirror.

    What deciding takes comes before the hidden vectors, as part of dispatch; `serving` has decided who is visited.
    """
    sent, asked = exchange(topology, visits), exchange.deciding(topology, visits)
    if not isinstance(sent, Rounds):  # loads are alike both ways: so is one derivative enough
        sent = tuple(tuple(times.loaded(topology, flows) for flows in phase) for phase in sent)
    before: list[AbstractDemand] = []
    if costs.deciding is not None:
        before += _decided(costs.deciding, topology, visits, times, (serving, exchange))
    if asked is not None:
        before.append(_demand(asked, jnp.ones(()), times))
    dispatch = _demand(sent, costs.dispatch_bytes, times, mirrored=True)
    dispatch = InTurn((*before, dispatch)) if before else dispatch
    compute, combine = expert_work(visits, costs, support), _demand(sent, costs.combine_bytes, times)
    return Stage("dispatch", dispatch), Stage("compute", compute), Stage("combine", combine)


def _decided(
    deciding: Deciding,
    topology: AbstractTopology,
    visits: Visits,
    times: AbstractTimeModel,
    rules: Iterable[AbstractServing | AbstractExchange | None],
) -> tuple[AbstractDemand, ...]:
    """Where rules have to know the batch: all nodes tell each other what their tokens chose, then tokens take turns.

    Each node multicasts along the tree of its paths. Messages wait meanwhile, nodes need not.
    """
    knowing = [rule for rule in rules if rule is not None and rule.knows == "batch"]
    if not knowing:
        return ()
    nodes, weight = topology.num_nodes, visits.weight * (deciding.told_bytes > 0)
    telling = jax.ops.segment_sum(weight, visits.source, nodes)  # tokens that live at each node
    everyone, one = jnp.ones((nodes, nodes), weight.dtype), jnp.ones((), weight.dtype)
    told = ((Flows(everyone, jnp.arange(nodes, dtype=jnp.int32), one, telling, route="tree"),),)
    turns = sum(rule.choices_in_turn(visits.weight.sum()) for rule in knowing)
    return (
        Traffic(told, deciding.told_bytes, times, mirrored=True),
        Fixed(turns * deciding.choice_seconds, waiting="network"),
    )


def _demand(
    sent: Phases | Rounds, unit: Float[Array, ""], times: AbstractTimeModel, mirrored: bool = False
) -> AbstractDemand:
    """The demand of traffic whose amounts are of `unit` bytes each."""
    if isinstance(sent, Rounds):
        return Steps(sent, unit, times, mirrored)
    return Traffic(sent[::-1] if mirrored else sent, unit, times, mirrored)
