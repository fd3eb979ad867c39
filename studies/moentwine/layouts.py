"""Token layouts measured on the mesh (Fig. 8 and 10b), and what their devices expect of balanced gating."""

from itertools import combinations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.networks import hop_counts
from jaxmoe.network import Counts
from jaxmoe.placement.token_layout import TokenLayout


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
