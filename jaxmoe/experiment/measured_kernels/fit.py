"""A kernel's numbers from measured rows: first those with a meaning, then the residual, by robust descent.

The loss is of logarithms of modelled over measured seconds, and linear beyond `OUTLIER`: a series that is several times
slow does not pull. Every fit draws the same number of rows a step, so that all kernels of a kind share one compiled
function.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.gpu.kernel import KEPT, LEAST, Base, FittedKernel, Reach, Residual, Terms, rising_inputs

OUTLIER = 0.05  # error beyond which a row counts linearly
BATCH = 1024  # rows of a step
SIZES = (4096, 8)  # the fewest rows that a fit is compiled for, and how many times more the next
SPREAD, UNSEEN = (1e-3, 1e-2), 1e6  # of inputs: the least that counts, what is added to it, and that of the others
BASE_STEPS = 300
RIDGE, FEW = 0.01, 4  # penalty of the squared distance of a number from its start, where fewer shapes tell it
BASE_RATE, RATE = 0.03, 0.01


class Recipe(NamedTuple):
    """How a residual is fitted: steps, units of a layer, and penalties of squared weights.

    `by_shape` keeps what the shape does to it smooth, where few shapes were measured; `units` all of it small.
    """

    steps: int
    width: int
    by_shape: float
    units: float


class FittedRows(NamedTuple):
    """Terms and logarithms of measured seconds of some rows, with the weight that each has."""

    terms: Terms
    log: Float[Array, " row"]


def fit(terms: Terms, seconds: np.ndarray, shapes: int, recipe: Recipe, seed: int) -> tuple[FittedKernel, FittedKernel]:
    """The kernel of rows of so many shapes: its base alone, and with a residual, which moves the base a little."""
    # Rows are repeated up to one of few sizes, which fits of other kernels share; none of the repeated ones is drawn.
    at = np.minimum(np.arange(_padded_size(len(seconds))), len(seconds) - 1)
    rows = FittedRows(
        Terms(*(jnp.asarray(part[at], jnp.float32) for part in terms)), jnp.log(jnp.asarray(seconds[at], jnp.float32))
    )
    rng = np.random.default_rng(seed)
    alone = _descend(
        _started(terms, seconds),
        rows,
        _draws(rng, len(seconds), BASE_STEPS),
        jnp.asarray(RIDGE if shapes < FEW else 0.0),
    )
    scale = Scale.of(alone, rows.terms)
    begin = alone, _new_residual(scale, recipe.width, seed)
    draws = _draws(rng, len(seconds), recipe.steps)
    base, scaled = _descend_scaled(begin, scale, rows, draws, jnp.asarray([recipe.by_shape, recipe.units]))
    residual = _unscaled(scaled, scale)
    return FittedKernel(alone), FittedKernel(base, residual, _reach_of(base, residual, rows.terms))


@jax.jit
def _reach_of(base: Base, residual: Residual, terms: Terms) -> Reach:
    apart = jnp.log(FittedKernel(base, residual).seconds(terms) / base.seconds(terms))
    return Reach(apart.min(), apart.max())


def _padded_size(rows: int) -> int:
    size, factor = SIZES
    while size < rows:
        size *= factor
    return size


def _draws(rng: np.random.Generator, rows: int, steps: int) -> Int[Array, "step draw"]:
    return jnp.asarray(rng.integers(0, rows, (steps, BATCH)), jnp.int32)


def _started(terms: Terms, seconds: np.ndarray) -> Base:
    """A guess: the fastest row is a launch, and three quarters of the data sheet's rates are reached."""
    launch = np.log(0.7 * np.quantile(seconds, 0.02))
    tiles = terms.tiles.shape[-1]
    seen = np.asarray(terms.memory).max(axis=0) > 0  # bytes that no row moves take no time
    return Base(
        jnp.asarray(launch, jnp.float32),
        jnp.asarray(np.where(seen, np.log(1.3), np.log(LEAST)), jnp.float32),
        jnp.full(tiles, np.log(1.5), jnp.float32) + 0.1 * jnp.arange(tiles, dtype=jnp.float32)[::-1],
        jnp.full(tiles, np.log(5e-7), jnp.float32),
        jnp.asarray(0.0, jnp.float32),
    )


# The residual is fitted on inputs of mean 0 and deviation 1, which are then taken into its weights.


class Scale(NamedTuple):
    """Mean and deviation of inputs of a residual."""

    rising: tuple[Array, Array]
    shape: tuple[Array, Array]

    @classmethod
    def of(cls, base: Base, terms: Terms) -> "Scale":
        return cls(*_spread_of(base, terms))


@jax.jit
def _spread_of(base: Base, terms: Terms) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    rising = rising_inputs(terms, jnp.log(base.seconds(terms)))

    def told(values: Array) -> tuple[Array, Array]:
        spread = values.std(axis=0)
        # What did not change in the rows tells nothing of rows where it does.
        return values.mean(axis=0), jnp.where(spread > SPREAD[0], spread + SPREAD[1], UNSEEN)

    return told(rising), told(terms.shape)


def _new_residual(scale: Scale, width: int, seed: int) -> Residual:
    """Small weights; the base's logarithm passes, so that the residual starts as none."""
    keys = jax.random.split(jax.random.key(seed), 4)
    rising, shape = scale.rising[0].shape[0], scale.shape[0].shape[0]

    def drawn(key: Array, *size: int) -> Array:
        return jax.random.normal(key, size, jnp.float32)

    small = (0.5 / rising) ** 0.5
    direct = jnp.full(rising, 0.05, jnp.float32).at[0].set(jnp.sqrt((1 - KEPT) * scale.rising[1][0]))
    return Residual(
        rising=small * (0.5 + jnp.abs(drawn(keys[0], width, rising))),
        shape=0.3 * drawn(keys[1], width, shape) / max(shape, 1) ** 0.5,
        first=drawn(keys[2], width),
        joined=(0.5 / width) ** 0.5 * (0.5 + jnp.abs(drawn(keys[3], width, width))),
        again=jnp.zeros((width, shape), jnp.float32),
        second=jnp.zeros(width, jnp.float32),
        out=jnp.full(width, 0.1, jnp.float32),
        direct=direct,
        linear=jnp.zeros(shape, jnp.float32),
        bias=(1 - KEPT) * scale.rising[0][0],
    )


def _unscaled(residual: Residual, scale: Scale) -> Residual:
    """The residual of inputs as they are, from one of scaled inputs."""
    (mean, spread), (centre, width) = scale
    rising, shape, again = residual.rising**2 / spread, residual.shape / width, residual.again / width
    direct, linear = residual.direct**2 / spread, residual.linear / width
    return Residual(
        rising=jnp.sqrt(rising),
        shape=shape,
        first=residual.first - rising @ mean - shape @ centre,
        joined=residual.joined,
        again=again,
        second=residual.second - again @ centre,
        out=residual.out,
        direct=jnp.sqrt(direct),
        linear=linear,
        bias=residual.bias - direct @ mean - linear @ centre,
    )


def _loss(log: Array, rows: FittedRows) -> Array:
    return optax.huber_loss(log - rows.log, delta=OUTLIER).mean() / OUTLIER


def _penalty(residual: Residual, by_shape: Array, units: Array) -> Array:
    shape = sum((part**2).sum() for part in (residual.shape, residual.again, residual.linear))
    return by_shape * shape + units * sum((part**4).sum() for part in (residual.out, residual.joined, residual.rising))


def _apart(base: Base, usual: Base) -> Array:
    return sum(
        ((part - other) ** 2).sum() for part, other in zip(jax.tree.leaves(base), jax.tree.leaves(usual), strict=True)
    )


@jax.jit
def _descend(base: Base, rows: FittedRows, draws: Array, ridge: Array) -> Base:
    optimiser = optax.adam(optax.cosine_decay_schedule(BASE_RATE, draws.shape[0]))

    usual = base

    def step(state, at):
        base, moments = state
        some = jax.tree.map(lambda part: part[at], rows)
        gradient = jax.grad(lambda b: _loss(jnp.log(b.seconds(some.terms)), some) + ridge * _apart(b, usual))(base)
        change, moments = optimiser.update(gradient, moments, base)
        return (eqx.apply_updates(base, change), moments), None

    (base, _), _ = jax.lax.scan(step, (base, optimiser.init(base)), draws)
    return base


@jax.jit
def _descend_scaled(
    begin: tuple[Base, Residual], scale: Scale, rows: FittedRows, draws: Array, penalties: Float[Array, "2"]
) -> tuple[Base, Residual]:
    schedule = optax.warmup_cosine_decay_schedule(0, RATE, 100, draws.shape[0], RATE * 0.01)
    optimiser = optax.adam(schedule)

    def loss(kernel: tuple[Base, Residual], some: FittedRows) -> Array:
        base, residual = kernel
        log = jnp.log(base.seconds(some.terms))
        (mean, spread), (centre, width) = scale
        rising = (rising_inputs(some.terms, log) - mean) / spread
        modelled = KEPT * log + residual(rising, (some.terms.shape - centre) / width)
        return _loss(modelled, some) + _penalty(residual, *penalties)

    def step(state, at):
        kernel, moments = state
        gradient = jax.grad(loss)(kernel, jax.tree.map(lambda part: part[at], rows))
        change, moments = optimiser.update(gradient, moments, kernel)
        return (eqx.apply_updates(kernel, change), moments), None

    (kernel, _), _ = jax.lax.scan(step, (begin, optimiser.init(begin)), draws)
    return kernel
