"""Loads of the experts of a rank, by how many tokens are routed: drawn once for a grid of sizes, then interpolated."""

from collections.abc import Callable
from functools import lru_cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.special import ndtri

from jaxmoe.hardware.gpu.terms import TILE_ROWS, ExpertLoads, Numbers
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import EMPTY

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
    chances = rng.permutation(np.exp(spread * ndtri((np.arange(experts) + 0.5) / experts)))
    held = eplb(chances, experts + redundant, ranks) if redundant else np.arange(experts)

    def draw(choices: int) -> Int[np.ndarray, "draw expert"]:
        if spread > 0:
            return rng.multinomial(choices, chances / chances.sum(), size=DRAWS)
        return np.tile(_even(choices, experts), (DRAWS, 1))

    return _table(draw, np.tile(held, (DRAWS, 1)), top_k, ranks)


def loads_of_layers(
    shares: Float[np.ndarray, "layer expert"],
    held: Int[np.ndarray, "layer slot"],
    top_k: int,
    ranks: int,
    seed: int = 0,
) -> ExpertLoadTable:
    """The table of layers whose experts have such shares of all choices, the mean over layers.

    `held` says which expert each slot has, or EMPTY; ranks have equally many slots, one rank after another. Choices are
    taken as independent, and copies of an expert have equal parts of its choices. Of one seed all have the same draws.
    """
    rng = np.random.default_rng(seed)
    chances = shares / shares.sum(axis=1, keepdims=True)
    return _table(lambda choices: rng.multinomial(choices, chances), held, top_k, ranks)


def _table(
    draw: Callable[[int], Int[np.ndarray, "draw expert"]], held: Int[np.ndarray, "draw slot"], top_k: int, ranks: int
) -> ExpertLoadTable:
    """The table of mean loads over draws of so many choices, each with its own slots."""
    draws, slots = held.shape
    copies = np.maximum((held[:, :, None] == np.arange(held.max() + 1)).sum(axis=1), 1)
    rows = []
    for tokens in SIZES.tolist():
        counts = draw(tokens * top_k)
        of_slot = np.take_along_axis(np.minimum(counts, tokens) / copies, np.maximum(held, 0), axis=1)
        of_slot = np.where(held == EMPTY, 0.0, of_slot)
        of_rank = of_slot.reshape(draws, ranks, slots // ranks)
        most = of_rank[np.arange(draws), of_rank.sum(axis=2).argmax(axis=1)]
        tiles = [np.ceil(most / rows_).sum(axis=1).mean() for rows_ in TILE_ROWS]
        rows.append([(most > 0).sum(axis=1).mean(), most.sum(axis=1).mean(), most.max(axis=1).mean(), *tiles])
    return ExpertLoadTable(jnp.log(jnp.maximum(jnp.asarray(rows, jnp.float32), LEAST)))


def _even(choices: int, experts: int) -> Int[np.ndarray, " expert"]:
    """So many choices on every expert, as even as whole numbers are."""
    return np.diff(np.arange(experts + 1) * choices // experts)
