"""Loads of the experts of a rank, by how many tokens are routed: drawn once for a grid of sizes, then interpolated."""

from functools import lru_cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.stats import norm

from jaxmoe.hardware.gpu.terms import TILE_ROWS, ExpertLoads, Numbers
from jaxmoe.placement.eplb import eplb

DRAWS = 8
# Spread of the logarithm of an expert's popularity, in the middle of what DeepSeek-V2-Lite and OLMoE have on real text.
SPREAD = 0.8
LEAST = 1e-2  # tokens of an expert: no logarithm of less
SIZES = np.unique(np.rint(2 ** np.arange(0, 17.01, 0.5)).astype(int))  # tokens of a step


class ExpertLoadTable(eqx.Module):
    """Mean loads of the most loaded rank, over draws from a popularity of experts that tokens choose by.

    Logarithms at `SIZES` tokens of all ranks together, a row for each field of `ExpertLoads` and each of its tiles.
    Several such tables are one for each row of tokens.
    """

    logs: Float[Array, "*row size load"]

    def __call__(self, tokens: Numbers) -> ExpertLoads:
        """Loads for so many tokens, of any shape; beyond `SIZES` what falls on experts grows with them."""
        tokens = jnp.asarray(tokens, jnp.float32)
        if self.logs.ndim > 2:
            return jax.vmap(lambda logs, count: ExpertLoadTable(logs)(count))(self.logs, tokens)
        sizes = jnp.log(jnp.asarray(SIZES, jnp.float32))
        at = jnp.log(jnp.maximum(tokens, 1.0))
        found = jnp.exp(jax.vmap(lambda log: jnp.interp(at, sizes, log), 1, -1)(self.logs))
        beyond = jnp.maximum(tokens / SIZES[-1], 1.0)
        touched, slots, heaviest = (found[..., part] for part in range(3))
        return ExpertLoads(touched, slots * beyond, heaviest * beyond, tokens, found[..., 3:] * beyond[..., None])


@lru_cache(maxsize=256)  # layouts of a sweep have few tables between them
def expert_loads(
    experts: int, top_k: int, ranks: int, spread: float = SPREAD, seed: int = 0, redundant: int = 0
) -> ExpertLoadTable:
    """The table of a layer whose experts lie on `ranks` in turn, in equal numbers.

    The popularity of experts is log-normal, `spread` being the standard deviation of its logarithm; with 0 all have as
    many choices, as in benchmarks that balance them. Choices are taken as independent, so a token may choose an expert
    twice. With `redundant` copies of experts, EPLB makes and places copies by this popularity, and those of an expert
    have equal parts of its choices. Time is that of the rank with the most choices.
    """
    rng = np.random.default_rng(seed)
    chances = rng.permutation(np.exp(spread * norm.ppf((np.arange(experts) + 0.5) / experts)))
    slots = experts + redundant
    held = eplb(chances, slots, ranks) if redundant else np.arange(experts)
    copies = np.bincount(held, minlength=experts)
    rows = []
    for tokens in SIZES.tolist():
        drawn = rng.multinomial(tokens * top_k, chances / chances.sum(), size=DRAWS)
        counts = drawn if spread > 0 else _even(tokens * top_k, experts)
        of_slot = (np.minimum(counts, tokens) / copies)[:, held]
        of_rank = of_slot.reshape(DRAWS, ranks, slots // ranks)
        most = of_rank[np.arange(DRAWS), of_rank.sum(axis=2).argmax(axis=1)]
        tiles = [np.ceil(most / rows_).sum(axis=1).mean() for rows_ in TILE_ROWS]
        rows.append([(most > 0).sum(axis=1).mean(), most.sum(axis=1).mean(), most.max(axis=1).mean(), *tiles])
    return ExpertLoadTable(jnp.log(jnp.maximum(jnp.asarray(rows, jnp.float32), LEAST)))


def _even(choices: int, experts: int) -> np.ndarray:
    """So many choices on every expert, as even as whole numbers are, in every draw."""
    ends = np.arange(experts + 1) * choices // experts
    return np.tile(np.diff(ends), (DRAWS, 1))
