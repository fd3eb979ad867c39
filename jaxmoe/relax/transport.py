"""The transport plan of Sinkhorn iterations, and geometric annealing."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def sinkhorn(
    logits: Float[Array, "row column"],
    row_sum: Float[Array, " row"],
    column_sum: Float[Array, " column"],
    iterations: int = 20,
) -> Float[Array, "row column"]:
    """Scale exp(logits) towards the margins by alternating normalisation (Sinkhorn 1967).

    Rows are normalised last, so row sums are exact and column sums as near as the iterations bring them.
    `row_sum` and `column_sum` must be positive and have the same total. Differentiable by unrolling.
    """
    log_row, log_column = jnp.log(row_sum), jnp.log(column_sum)

    def step(potential, _):
        row = log_row - jax.nn.logsumexp(logits + potential, axis=1)
        column = log_column - jax.nn.logsumexp(logits + row[:, None], axis=0)
        return column, None

    column, _ = jax.lax.scan(step, jnp.zeros_like(log_column), None, length=iterations)
    row = log_row - jax.nn.logsumexp(logits + column, axis=1)
    return jnp.exp(logits + row[:, None] + column)


Progress = Float[np.ndarray, "..."] | float


def geometric(start: float, stop: float, progress: Progress) -> Progress:
    """From `start` at progress 0 to `stop` at progress 1, by equal ratios."""
    return start * (stop / start) ** progress
