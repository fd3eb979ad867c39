"""Stages before the experts whose seconds a test states."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import Server, Usage
from jaxmoe.engine.stage import Priced
from jaxmoe.engine.times import ATTENTION


def known_attention(
    attention: Float[Array, ""], all_reduce: Float[Array, ""], links: Float[Array, " link"]
) -> tuple[Priced, Priced]:
    """Attention and its all-reduce of these seconds, s, and how long links are busy with the latter, s."""

    def known(name: str, server: Server, seconds: Array, busy: dict[str, Array]) -> Priced:
        usage = Usage(seconds, busy, {}, jnp.zeros_like(seconds))
        before = ("attention",) if name != "attention" else ()
        return Priced(name, usage, server, before, ATTENTION, "even", "stage")

    return known("attention", "nodes", attention, {}), known("all_reduce", "network", all_reduce, {"link": links})
