"""Small layers whose shares, rates and weights are binary fractions, so that loops and arrays find the same ties."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from oracles import cases
from oracles.arrays import floats, full
from oracles.layer import Tokens

from jaxmoe.traces import Batch

NODES, EXPERTS, TOKENS, TOP_K = 6, 8, 12, 3


@dataclass
class Case:
    share: np.ndarray
    tokens: Tokens
    broadcast: np.ndarray
    forecast: np.ndarray
    seconds_each: np.ndarray

    @property
    def arrays(self) -> tuple[jax.Array, Batch, jax.Array, jax.Array]:
        """Share, batch, broadcast and seconds, as `serve` takes them."""
        share, seconds = floats(self.share), floats(self.seconds_each)
        return share, cases.batch(self.tokens), jnp.asarray(self.broadcast), seconds


def quarters(rng: np.random.Generator, experts: int = EXPERTS, nodes: int = NODES) -> np.ndarray:
    """Shares that are quarters, on up to four nodes."""
    share = np.zeros((experts, nodes))
    for row in share:
        np.add.at(row, rng.choice(nodes, 4, p=rng.dirichlet(np.full(nodes, 0.3))), 0.25)
    return share


def random_case(seed: int) -> Case:
    """Random choices, some missing, of which any number of experts may be broadcast."""
    rng = np.random.default_rng(seed)
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True)
    return Case(
        share=quarters(rng),
        tokens=tokens,
        broadcast=rng.random(EXPERTS) < rng.random(),
        forecast=rng.integers(0, 9, EXPERTS).astype(float),
        seconds_each=rng.choice([0.5, 1.0, 2.0], NODES),
    )


def skewed_batches(rng: np.random.Generator, layers: int, batches: int, tokens: int = 64) -> Batch:
    """Batches [layer, batch, ...] that mostly choose two experts of each layer, others in every layer."""
    liking = np.exp(-np.stack([rng.permutation(EXPERTS) for _ in range(layers)]) / 1.5)
    luck = rng.gumbel(size=(layers, batches, tokens, EXPERTS)) + np.log(liking)[:, None, None]
    experts = np.argsort(-luck, axis=-1)[..., :TOP_K]
    return Batch(
        experts=jnp.asarray(experts, jnp.int32),
        token_draw=jnp.asarray(rng.random(experts.shape[:3]), jnp.float32),
        draw=full(experts.shape, 0.0),
        weight=full(experts.shape[:3], 1.0),
    )
