"""One node for each of several rows: its number, or relaxed a distribution over all nodes.

Exact rules name a node. What is looked up by number is not multiplied by a matrix of ones and zeros: on CPUs that takes
several times as long.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

NodeChoice = Int[Array, " _"] | Float[Array, "_ node"]  # [row] or [row, node]


def as_weights(choice: NodeChoice, nodes: int, dtype: DTypeLike) -> Float[Array, "row node"]:
    """1 at the node of every row; a distribution as it is."""
    return choice if choice.ndim == 2 else jax.nn.one_hot(choice, nodes, dtype=dtype)


def at_nodes(choice: NodeChoice, table: Float[Array, "node column"]) -> Float[Array, "row column"]:
    """The table's row of every chosen node; under a distribution their mean."""
    if choice.ndim == 2:
        return choice @ table
    # The product changes nothing. Without it, XLA works out what is in the table again at every look.
    kept = jnp.matmul(jnp.eye(len(table), dtype=table.dtype), table, precision=jax.lax.Precision.HIGHEST)
    return kept.at[choice].get(mode="clip")
