"""Terms of a whole module of latent attention (MLA): its products, and the attention between them, in one launch."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxmoe.hardware.gpu.kernel import Terms
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES, Sheet
from jaxmoe.hardware.gpu.terms import Heads, Numbers, decode, prefill, stacked, whole


class LatentSizes(NamedTuple):
    """Sizes of one layer; a head compares `nope` elements without position and `rope` with it. `q_rank` 0 is none."""

    hidden: float
    q_rank: float
    kv_rank: float
    nope: float
    rope: float
    value: float


DEEPSEEK_V3 = LatentSizes(hidden=7168, q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)


def latent_prefill(
    batch: Numbers, tokens: Numbers, heads: Numbers, sizes: LatentSizes, sheet: Sheet, cache: float
) -> Terms:
    """Terms of the attention alone over new tokens, with keys and values of each head."""
    alone = Heads(heads, heads, sizes.nope + sizes.rope, sizes.value, jnp.zeros_like(heads))
    return prefill(batch, tokens, alone, sheet, "bfloat16", cache)


def latent_decode(
    batch: Numbers, cached: Numbers, heads: Numbers, sizes: LatentSizes, sheet: Sheet, cache: float
) -> Terms:
    """Terms of the attention alone of one new token of each sequence, on the short vectors that all heads share."""
    shared = Heads(heads, jnp.ones_like(heads), sizes.kv_rank + sizes.rope, sizes.kv_rank, jnp.zeros_like(heads))
    return decode(batch, cached, shared, sheet, "bfloat16", cache, latent=True)


def with_projections(
    found: Terms, tokens: Numbers, heads: Numbers, sizes: LatentSizes, sheet: Sheet, precision: str
) -> Terms:
    """Terms of attention, `found`, with those of the projections around it for so many tokens."""
    shared = sizes.hidden * (sizes.q_rank + sizes.kv_rank + sizes.rope)
    queries = (sizes.q_rank or sizes.hidden) * (sizes.nope + sizes.rope)
    of_head = queries + sizes.kv_rank * (sizes.nope + sizes.value)
    weights = shared + heads * (of_head + sizes.value * sizes.hidden)
    work = 2 * tokens * weights / sheet.rate(precision)
    moved = weights * WEIGHT_BYTES[precision] / sheet.bandwidth
    vectors = tokens * (sizes.hidden + heads * (sizes.nope + sizes.rope)) * 2 / sheet.bandwidth
    padded = whole(tokens, 128) * 128 / tokens * work
    logs = stacked([jnp.log(work), jnp.log(padded), jnp.log(tokens)])
    return found._replace(
        memory=jnp.concatenate([found.memory, stacked([moved, vectors])], axis=-1),
        tiles=found.tiles + padded[..., None],
        sizes=jnp.concatenate([found.sizes, logs], axis=-1),
    )
