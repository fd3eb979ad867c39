"""Times of every placement of one small layer on given batches, as tables over sets of nodes.

Communication depends on the hosts of every expert alone. A token of at most two experts keeps links busy for times that
depend on their two sets of hosts. So one table over pairs of sets describes the network, and the model itself fills it,
one token at a time. With the hosts given, dividing the work is a linear programme.

A set of nodes is a number: bit n is set where node n belongs to it.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.engine import Layer
from jaxmoe.network import AbstractExchange, Congestion, sharded_visits
from jaxmoe.placement import PlanError
from jaxmoe.placement.rounding import SLACK, rebalance
from jaxmoe.relax import HardSupport
from jaxmoe.traces import Batch
from jaxmoe.tune.problem import PlacementProblem

SUPPORTED = ("lowest_host", "fewest_hops")

MOST_NODES = 9  # tables grow fourfold with every node
TOKEN_SHARE = 1e-7  # makes a node a host that computes next to nothing: it may be a good place to gather at
NOTHING = 1e-30  # FLOP/s, or room, of a set of nodes that has none

Sets = Int[np.ndarray, " expert"]


@dataclass(frozen=True)
class Costs:
    """Tables of one layer. A token's first expert is the one that names its gather node.

    `demand` and `supply` have one row for the FLOPs of every batch, then one for memory, in experts. Where dispatch
    and combine keep alike links alike busy, `pair_time` has one stage that is run twice, else both.
    """

    pair_time: Float[np.ndarray, "set set2 stage resource"]  # s that one token keeps every link and port busy
    pair_delay: Float[np.ndarray, "set set2 stage"]  # s of the longest path of one token
    tokens: Float[np.ndarray, "batch expert expert2"]  # that choose both; on the diagonal, those of one expert
    demand: Float[np.ndarray, "row expert"]
    supply: Float[np.ndarray, "row set"]  # FLOP/s of all nodes of a set, and their room
    seconds_per_flop: Float[np.ndarray, " node"]
    room: Float[np.ndarray, " node"]

    @property
    def runs(self) -> float:
        """How often every stage of `pair_time` is run."""
        return 2 / self.pair_time.shape[2]

    @property
    def even(self) -> Float[np.ndarray, " batch"]:
        """Seconds of compute when all nodes are equally busy."""
        return self.demand[:-1].sum(axis=1) / self.supply[:-1, -1]

    def link_times(self, sets: Sets) -> Float[np.ndarray, "batch stage resource"]:
        """Seconds that every link and port is busy when experts live on these sets."""
        return np.einsum("bij,ijsr->bsr", self.tokens, self.pair_time[sets[:, None], sets])

    def communication(self, sets: Sets) -> float:
        """Mean seconds of dispatch and combine when experts live on these sets."""
        used = (self.tokens > 0)[..., None]
        delay = np.where(used, self.pair_delay[sets[:, None], sets], 0).max(axis=(1, 2))
        return self.runs * float((self.link_times(sets).max(axis=2) + delay).sum(axis=1).mean())

    def compute(self, busiest: Float[np.ndarray, "*lead row"]) -> Float[np.ndarray, "*lead"]:
        """Least mean seconds of the slowest node, by the busiest set of nodes of every row (demand over supply).

        A set of nodes must do the work of all experts that live nowhere else. For one batch without a memory limit
        nothing else stands in the way (max flow, min cut); in general it is a bound. Infinite where memory is short.
        """
        seconds = np.maximum(busiest[..., :-1], self.even).mean(axis=-1)
        return np.where(busiest[..., -1] > SLACK, np.inf, seconds)

    def seconds(self, share: Float[np.ndarray, "expert node"]) -> float:
        """Mean total time of a plan, s."""
        node_time = self.demand[:-1] @ share * self.seconds_per_flop
        return self.communication(as_sets(share)) + float(node_time.max(axis=1).mean())

    def divide(self, sets: Sets) -> Float[np.ndarray, "expert node"] | None:
        """The best plan whose experts live on these sets, or `None` where they do not fit."""
        support = hosts(len(self.room))[sets]
        try:
            share = rebalance(support, self.demand[:-1], self.seconds_per_flop, self.room)
        except PlanError:
            return None
        named = np.where(support, np.maximum(share, TOKEN_SHARE), 0)
        # Hosts without work are dropped, unless they are of use.
        return min(share, named / named.sum(axis=1, keepdims=True), key=self.seconds)


def hosts(nodes: int) -> np.ndarray:
    """Members of every set of nodes, bool [set, node]."""
    return (np.arange(2**nodes)[:, None] >> np.arange(nodes) & 1).astype(bool)


def as_sets(share: Float[np.ndarray, "expert node"]) -> Sets:
    """The set of hosts of every expert."""
    return (share > 0) @ (1 << np.arange(share.shape[1]))


def layer_costs(problem: PlacementProblem, layer: int) -> Costs:
    """Tables of the layer at position `layer` of the problem. Raises `PlanError` for what they cannot describe."""
    batches = _checked(problem)
    model, experts = problem.model, problem.trace.num_experts
    tokens, demand = _counts(jax.tree.map(lambda leaf: leaf[layer], batches), experts)
    rates, room = np.asarray(model.machine.die.flops, float), problem.room
    sets = hosts(problem.num_nodes)
    reach = np.concatenate([np.broadcast_to(rates, (len(demand), len(rates))), room[None]])
    supply = np.maximum(np.where(sets, reach[:, None, :], 0).sum(axis=2), NOTHING)
    pair_time, pair_delay = _pairs(model, sets)
    return Costs(
        pair_time=pair_time,
        pair_delay=pair_delay,
        tokens=tokens,
        demand=np.concatenate([demand * float(model.costs.flops_per_token_expert), np.ones((1, experts))]),
        supply=supply,
        seconds_per_flop=1 / rates,
        room=room,
    )


def _checked(problem: PlacementProblem) -> Batch:
    model = problem.model
    for wrong, message in (
        (problem.p95_weight > 0, f"p95_weight is {problem.p95_weight}; set it to 0, the optimum is of the mean"),
        (problem.worst_weight > 0, f"worst_weight is {problem.worst_weight}; set it to 0, the optimum is of the mean"),
        (model.mode != "sharded", f"mode is {model.mode}; use sharded placements"),
        (problem.num_nodes > MOST_NODES, f"{problem.num_nodes} nodes; use at most {MOST_NODES}"),
        (problem.trace.top_k > 2, f"top_k is {problem.trace.top_k}; use traces of at most 2 experts per token"),
        (_limited_by_memory(model), "dies have a memory bandwidth; set it to none"),
        (not isinstance(model.time_model, Congestion), f"time model {type(model.time_model).__name__}; use Congestion"),
        (
            not _is_supported(model.exchange),
            f"exchange {model.exchange}; use {' or '.join(SUPPORTED)}",
        ),
    ):
        if wrong:
            raise PlanError(f"optimum() does not support this problem: {message}")
    if problem.batches is None:
        raise PlanError("the optimum is of given batches; pass PlacementProblem(batches=...)")
    return problem.batches


def _counts(batches: Batch, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every pair of experts [batch, expert, expert2], and choices of every expert [batch, expert]."""
    weight = np.asarray(batches.weight, float)
    chosen = np.broadcast_to(np.asarray(batches.experts), (*weight.shape, batches.experts.shape[-1]))
    first = np.broadcast_to(np.asarray(batches.gather_expert), weight.shape)
    other = np.where(chosen[..., 0] == first, chosen[..., -1], chosen[..., 0])
    other = np.where(other < 0, first, other)
    batch, named = np.arange(len(weight))[:, None], first >= 0  # a token without a gather node sends nothing
    tokens, demand = np.zeros((len(weight), num_experts, num_experts)), np.zeros((len(weight), num_experts))
    np.add.at(tokens, (np.broadcast_to(batch, first.shape)[named], first[named], other[named]), weight[named])
    np.add.at(demand, (batch[..., None], chosen), np.where(chosen < 0, 0, weight[..., None]))
    return tokens, demand


def _pairs(model: Layer, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`pair_time` and `pair_delay`, as the model has them."""
    shares = sets[1:] / sets[1:].sum(axis=1, keepdims=True)
    one = Batch(jnp.array([[0, 1]]), jnp.zeros(1), jnp.zeros((1, 2)), jnp.ones(1))
    # The empty set comes first and costs nothing: no expert lives there.
    pad = [(1, 0), (1, 0), (0, 0), (0, 0)]
    time, delay = (np.asarray(table, float) for table in _of_pairs(model, jnp.asarray(shares, jnp.float32), one))
    dispatch, combine = time[:, :, 0], time[:, :, 1]
    topology = model.machine.topology
    ports = np.arange(topology.num_links, time.shape[-1])
    mirrored = np.concatenate([np.asarray(topology.reverse_links), ports])
    if np.allclose(dispatch[..., mirrored], combine, rtol=1e-6, atol=0) and np.array_equal(
        delay[..., 0], delay[..., 1]
    ):
        time, delay = time[:, :, 1:], delay[:, :, 1:]
    return np.pad(time, pad), np.pad(delay, pad[:3])


@eqx.filter_jit
def _of_pairs(
    model: Layer, shares: Float[Array, "set node"], token: Batch
) -> tuple[Float[Array, "set set2 stage resource"], Float[Array, "set set2 stage"]]:
    """Network time of one token whose two experts live on two sets of nodes, s, in dispatch and combine.

    Returns the busy time of every link and port, and the delay of the longest path.
    """
    topology, costs, price = model.machine.topology, model.costs, model.time_model

    def pair(first: Float[Array, " node"], other: Float[Array, " node"]):
        sent = model.exchange(topology, sharded_visits(jnp.stack([first, other]), token, HardSupport()))
        assert isinstance(sent, tuple)  # a gather's flows
        ((flows,),) = sent
        dispatch = price.of_mirrored(topology, flows, costs.dispatch_bytes)
        stages = dispatch, price.of_flows(topology, flows, costs.combine_bytes)
        busy = jnp.stack([jnp.concatenate([stage.link_time, stage.port_time]) for stage in stages])
        return busy, jnp.stack([stage.path_delay for stage in stages])

    return jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(shares, shares)


def _limited_by_memory(model: Layer) -> bool:
    return any(bool(np.isfinite(np.asarray(level.bandwidth)).any()) for level in model.machine.memory)


def _is_supported(exchange: AbstractExchange) -> bool:
    return exchange.name in SUPPORTED
