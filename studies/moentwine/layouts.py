"""Token layouts: their geometry (Fig. 8 and 10b), what devices expect of balanced gating, communication priced."""

from itertools import combinations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.networks import hop_counts
from jaxmoe.network import AbstractTimeModel, Counts, Rounds, price_rounds, token_exchange
from jaxmoe.network.collectives import CollectiveTime
from jaxmoe.network.token_communication import (
    AbstractTokenExchange,
    SlicedExchange,
    all_reduce_rounds,
    closing_rounds,
    scaled,
)
from jaxmoe.placement.token_layout import TokenLayout
from jaxmoe.relax import AbstractReduction


def average_hops(layout: TokenLayout) -> float:
    """Mean hops from a device to the holders from which it fetches the tokens that it does not have itself."""
    holder, node = layout.parts, np.arange(layout.num_nodes)
    hops = hop_counts(layout.shape)[holder, node]
    away = holder != node
    return float(hops[away].mean()) if away.any() else 0.0


def domain_boxes(layout: TokenLayout) -> Int[np.ndarray, "domain 4"]:
    """Bounding box of every domain: first and last x, first and last y."""
    x, y = np.unravel_index(np.arange(layout.num_nodes), layout.shape)
    inside = [layout.domain == domain for domain in range(layout.domain.max() + 1)]
    return np.array([[x[own].min(), x[own].max(), y[own].min(), y[own].max()] for own in inside])


def domain_area(layout: TokenLayout) -> Float[np.ndarray, " domain"]:
    """Devices in the bounding box of every domain."""
    low_x, high_x, low_y, high_y = domain_boxes(layout).T
    return (high_x - low_x + 1.0) * (high_y - low_y + 1)


def overlapping_domains(layout: TokenLayout) -> list[tuple[int, int]]:
    """Pairs of domains whose bounding boxes share a device."""
    boxes = domain_boxes(layout).tolist()

    def meet(one: list[int], other: list[int]) -> bool:
        return all(max(one[low], other[low]) <= min(one[low + 1], other[low + 1]) for low in (0, 2))

    return [(one, other) for one, other in combinations(range(len(boxes)), 2) if meet(boxes[one], boxes[other])]


def ring_step_hops(layout: TokenLayout) -> Int[np.ndarray, "group member"]:
    """Hops from every member to the next on its ring; 0 for a group of one."""
    return hop_counts(layout.shape)[layout.ring, np.roll(layout.ring, -1, axis=1)]


def balanced_counts(
    tokens: Float[Array, ""] | float, homes: int, nodes: int, clusters: int, num_experts: int, top_k: int
) -> Counts:
    """Expected counts for `tokens` tokens of each home, with equally likely experts spread evenly over nodes (VI-B).

    A token visits a node that holds n of E experts with the probability that its K distinct experts include one of the
    n. A node that holds at most one expert, shared with others by tokens, is visited with probability K / nodes.
    """

    def chance(parts: int) -> float:
        held = num_experts / parts
        missed = np.prod([1 - held / (num_experts - drawn) for drawn in range(top_k)]) if held < num_experts else 0.0
        return 1 - max(float(missed), 0.0) if held > 1 else top_k / parts

    each = jnp.asarray(tokens, float)
    return Counts(
        jnp.broadcast_to(each * chance(nodes), (homes, nodes)),
        jnp.broadcast_to(each * chance(clusters), (homes, clusters)),
    )


# A layer's communication priced.


class TokenCommunication(eqx.Module):
    """All-reduce, dispatch and combine of a layout on a network, s.

    `exchanging` is the time model of dispatch and combine, `reducing` that of collectives round rings.
    """

    exchange: AbstractTokenExchange
    all_reduce: Rounds  # of one byte
    closing: Rounds
    exchanging: AbstractTimeModel
    reducing: AbstractTimeModel

    def __call__(
        self,
        topology: AbstractTopology,
        counts: Counts,
        tokens: Float[Array, ""] | float,
        vector_bytes: Float[Array, ""] | float,
        reduction: AbstractReduction,
    ) -> dict[str, CollectiveTime]:
        """Every stage by name, for `tokens` in every group with hidden vectors of `vector_bytes`."""
        size = tokens * vector_bytes
        return {
            "all_reduce": price_rounds(self.reducing, topology, scaled(self.all_reduce, size), reduction),
            "dispatch": self._exchanged(topology, counts, vector_bytes, reduction, mirrored=True),
            "combine": self._exchanged(topology, counts, vector_bytes, reduction, mirrored=False),
            "closing": price_rounds(self.reducing, topology, scaled(self.closing, size), reduction),
        }

    def _exchanged(
        self,
        topology: AbstractTopology,
        counts: Counts,
        vector_bytes: Float[Array, ""] | float,
        reduction: AbstractReduction,
        mirrored: bool,
    ) -> CollectiveTime:
        """Dispatch or combine; what goes round rings is priced as other rings are."""
        if not isinstance(self.exchange, SlicedExchange):
            parts = [(self.exchanging, self.exchange(counts))]
        else:
            parts = [(self.reducing, self.exchange.around(counts)), (self.exchanging, self.exchange.fetched(counts))]
        priced = [
            price_rounds(model, topology, scaled(rounds, vector_bytes), reduction, mirrored) for model, rounds in parts
        ]
        if len({each.pair_time.shape for each in priced}) > 1:  # of models that price pairs or nodes of different kinds
            priced = [eqx.tree_at(lambda each: each.pair_time, each, each.pair_time[:0]) for each in priced]
        return jax.tree.map(lambda *each: sum(each), *priced)


def token_communication(
    layout: TokenLayout,
    topology: AbstractTopology,
    exchanging: AbstractTimeModel,
    reducing: AbstractTimeModel,
    both_ways: bool = True,
) -> TokenCommunication:
    """The communication of a layout on its network."""
    all_reduce, closing = all_reduce_rounds(layout, both_ways), closing_rounds(layout, both_ways)
    return TokenCommunication(token_exchange(layout, topology), all_reduce, closing, exchanging, reducing)
