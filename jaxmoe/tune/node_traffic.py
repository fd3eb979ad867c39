"""hd_moe's linear estimate of communication: what the busiest node sends, over one link's bandwidth (Eq. 2, 3).

Eq. 2 prints a product over a token's experts; the text below it says that a node counts when *any* of them lives
there, and that is what is counted here. The estimate knows nothing of paths: `gamma` scales it to simulated time.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.latency import LayerModel
from jaxmoe.network import sharded_visits
from jaxmoe.relax import HardSupport
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class GammaFit:
    """How simulated time follows the estimate: `gamma` times it, with the coefficient of determination `r2`."""

    gamma: float
    r2: float


def mean_bandwidth(model: LayerModel) -> Float[Array, ""]:
    """BW of Eq. 2 where links differ: their mean, B/s."""
    return jnp.mean(model.machine.topology.link_bandwidth)


def node_estimate(
    model: LayerModel, share: Float[Array, "expert node"], batch: Batch, bandwidth: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Estimated seconds of one stage, dispatch or combine, for a sharded plan (hd_moe Eq. 2).

    The largest volume of any node over `bandwidth`, B/s: a hidden vector for every token any of whose experts is
    there.
    """
    visits = sharded_visits(share, batch, HardSupport())
    return jnp.max(visits.weight @ visits.visited) * model.costs.combine_bytes / bandwidth


@eqx.filter_jit
def node_estimates(
    model: LayerModel,
    shares: Float[Array, "plan expert node"],
    batches: Batch,
    bandwidth: Float[Array, ""] | float | None = None,
) -> Float[Array, "plan batch"]:
    """The estimate for every plan of a layer and every batch, leaves [batch, ...]; links' mean bandwidth by default."""
    rate = mean_bandwidth(model) if bandwidth is None else bandwidth
    return jax.lax.map(lambda share: jax.vmap(lambda batch: node_estimate(model, share, batch, rate))(batches), shares)


def fit_gamma(estimates: Float[np.ndarray, "*cases"], simulated: Float[np.ndarray, "*cases"]) -> GammaFit:
    """Least squares through the origin, simulated = gamma * estimate, both in s (hd_moe Eq. 3).

    `r2` is 1 - sum of squared residuals / sum of squared deviations of `simulated` from its mean. Without an
    intercept it may be below 0. Raises `ValueError` where nothing can be fitted.
    """
    x, y = np.ravel(estimates).astype(float), np.ravel(simulated).astype(float)
    if not np.any(x) or np.ptp(y) == 0:
        raise ValueError(
            f"gamma cannot be fitted to {x.size} cases with estimates up to {x.max(initial=0):.3g} s and simulated "
            f"times from {y.min(initial=np.inf):.3g} to {y.max(initial=0):.3g} s; give times of plans that differ and "
            "communicate"
        )
    gamma = float(x @ y / (x @ x))
    return GammaFit(gamma, 1 - float(np.sum((y - gamma * x) ** 2) / np.sum((y - y.mean()) ** 2)))
