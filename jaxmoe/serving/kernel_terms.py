"""Terms of the kernels of a step, of each kind by the data sheet, the names of a kernel, and its numbers."""

import jax.numpy as jnp

from jaxmoe.hardware.gpu import latent, terms
from jaxmoe.hardware.gpu.kernel import Terms
from jaxmoe.hardware.gpu.latent import LatentSizes, with_projections
from jaxmoe.hardware.gpu.sheet import ACTIVATION_BYTES, WEIGHT_BYTES, Sheet
from jaxmoe.hardware.gpu.terms import ExpertLoads, Numbers

GATED = 3.0  # products of an expert


def product(sheet: Sheet, precision: str, rows: Numbers, columns: Numbers, inner: Numbers) -> Terms:
    weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
    return terms.product(rows, columns, inner, sheet, precision, weight, activation)


def experts(
    sheet: Sheet,
    precision: str,
    loads: ExpertLoads,
    hidden: Numbers,
    inner: Numbers,
    experts: Numbers,
    top_k: Numbers,
) -> Terms:
    weight, activation = WEIGHT_BYTES[precision], ACTIVATION_BYTES.get(precision, 2.0)
    return terms.fused_moe(loads, hidden, inner, experts, top_k, GATED, sheet, precision, weight, activation)


def prefill(
    sheet: Sheet,
    precision: str,
    cache: str,
    batch: Numbers,
    tokens: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    size: Numbers,
    window: Numbers,
) -> Terms:
    alike = terms.Heads(heads, kv_heads, size, size, window)
    return terms.prefill(batch, tokens, alike, sheet, precision, WEIGHT_BYTES[cache])


def decode(
    sheet: Sheet,
    cache: str,
    batch: Numbers,
    cached: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    size: Numbers,
    window: Numbers,
) -> Terms:
    alike = terms.Heads(heads, kv_heads, size, size, window)
    return terms.decode(batch, cached, alike, sheet, "bfloat16", WEIGHT_BYTES[cache])


def latent_prefill(
    sheet: Sheet, precision: str, cache: str, sizes: LatentSizes, batch: Numbers, tokens: Numbers, heads: Numbers
) -> Terms:
    found = latent.latent_prefill(batch, tokens, heads, sizes, sheet, WEIGHT_BYTES[cache])
    return with_projections(found, batch * tokens, heads, sizes, sheet, precision)


def latent_decode(
    sheet: Sheet,
    precision: str,
    cache: str,
    sizes: LatentSizes,
    batch: Numbers,
    cached: Numbers,
    heads: Numbers,
    queries: Numbers,
) -> Terms:
    # Queries of a sequence share its keys, as heads do.
    found = latent.latent_decode(batch, cached, heads * queries, sizes, sheet, WEIGHT_BYTES[cache])
    return with_projections(found, batch * queries, heads, sizes, sheet, precision)


def all_to_all(
    sheet: Sheet,
    operation: str,
    precision: str,
    tokens: Numbers,
    hidden: Numbers,
    top_k: Numbers,
    copies: Numbers,
    ranks: Numbers,
) -> Terms:
    return terms.all_to_all(operation, precision, tokens, hidden, top_k, copies, ranks, sheet)


def collective(sheet: Sheet, operation: str, bytes_: Numbers, ranks: Numbers) -> Terms:
    return terms.collective(operation, bytes_, jnp.maximum(ranks, 2), sheet)
