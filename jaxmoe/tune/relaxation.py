"""Relaxed placements: shares as a transport plan between experts and nodes.

Work W[e, n] = Sinkhorn(logits / temperature) has the experts' frequencies as row sums and a learned, nearly
even budget of the nodes as column sums; share = W / frequency. So work is balanced by construction and
descent is left with locality. As the temperature falls, W nears a vertex of the transport polytope: few
shares are not 0.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.latency import Decisions
from jaxmoe.relax import SoftSupport, sinkhorn


class AbstractParameters(eqx.Module):
    """What descent changes, for one layer: any arrays, and how they become decisions."""

    @abc.abstractmethod
    def decisions(
        self,
        frequency: Float[Array, " expert"],
        node_part: Float[Array, " node"],
        temperature: Float[Array, ""],
        budget_spread: Float[Array, ""],
    ) -> Decisions:
        """Relaxed decisions at a temperature; `node_part` is each node's part of all work if work were even."""


class TransportPlan(AbstractParameters):
    """A relaxed placement."""

    logits: Float[Array, "*lead expert node"]
    budget: Float[Array, "*lead node"]

    def decisions(self, frequency, node_part, temperature, budget_spread):
        return Decisions(self.share(frequency, node_part, temperature, budget_spread))

    def share(
        self,
        frequency: Float[Array, " expert"],
        node_part: Float[Array, " node"],
        temperature: Float[Array, ""],
        budget_spread: Float[Array, ""],
    ) -> Float[Array, "expert node"]:
        """Shares of every expert; `node_part` is what each node would hold of all work if work were even.

        Nodes' budgets stand to each other within a factor (1 + budget_spread) / (1 - budget_spread) of that.
        """
        budget = node_part * (1 + budget_spread * jnp.tanh(self.budget))
        work = sinkhorn(self.logits / temperature, frequency, budget / budget.sum())
        return work / frequency[:, None]


def random_plans(seed: int, layers: int, restarts: int, experts: int, nodes: int) -> TransportPlan:
    """Starts without preference but for noise; leaves are [layer, restart, ...]."""
    noise = np.random.default_rng([seed, 0]).normal(scale=0.5, size=(layers, restarts, experts, nodes))
    return TransportPlan(jnp.asarray(noise, jnp.float32), jnp.zeros((layers, restarts, nodes), jnp.float32))


def typical_part(frequency: Any, nodes: int) -> Any:
    """The share of an expert that fills a node: 1 for a cold expert, less for one that needs several nodes.

    `frequency` is a JAX or NumPy array [..., expert], and so is the result.
    """
    return 1 / (1 + (frequency * nodes - 1) * (frequency * nodes > 1))


def soft_hosts(frequency: Float[Array, " expert"], nodes: int, width: Float[Array, ""]) -> SoftSupport:
    """Soft support whose width is relative to the typical part of each expert.

    A width relative to the share alone would hardly see the hosts of hot experts, one relative to the work
    alone would hardly see those of cold ones.
    """
    return SoftSupport(width * typical_part(frequency, nodes)[:, None])
