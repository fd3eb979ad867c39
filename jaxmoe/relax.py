"""Smooth stand-ins for hard operations: maxima, which hosts count, one of many, transport plans; and annealing."""

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Numbers that a compiled function takes as arguments.


def as_number(value: Array | float) -> Array:
    """A Python float as a 0-d array of the default precision; arrays as they are.

    Equinox compiles a module's floats into a function, and would compile it anew for each value. Use it as
    `eqx.field(converter=...)`. The array promotes as a float does.
    """
    return jnp.asarray(value) if isinstance(value, float) else value


# The largest of many numbers, exactly or smoothly.


@jax.custom_jvp
def largest(values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
    """The largest of the last axis, 0 at least. Its derivative is shared by all that equal it but for rounding.

    That of `jnp.max` asks which values equal the maximum. A compiler that works these out anew, and rounds otherwise,
    finds none: it then divides by zero (seen on GPUs in double precision).
    """
    return jnp.max(values, axis=-1, initial=0)


@largest.defjvp
def _largest_jvp(primals, tangents):
    (values,), (changes,) = primals, tangents
    found = largest(values)
    alike = (values >= found[..., None] * (1 - 8 * jnp.finfo(values.dtype).eps)) | jnp.isnan(values)
    return found, jnp.where(alike, changes, 0).sum(axis=-1) / jnp.maximum(alike.sum(axis=-1), 1)


def least_at(values: Float[Array, "*batch items"]) -> Int[Array, "*batch"]:
    """Where the least of the last axis is, the first of equals: `argmin`, several times as fast on CPUs."""
    numbers = jnp.arange(values.shape[-1], dtype=jnp.float32)
    least = values.min(axis=-1, keepdims=True)
    return jnp.where(values == least, numbers, values.shape[-1]).min(axis=-1).astype(jnp.int32)


class AbstractReduction(eqx.Module):
    """Reduces the last axis to its largest value or to a smooth bound of it."""

    @abc.abstractmethod
    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        """Reduce non-negative `values`; the result has their unit."""


class HardMax(AbstractReduction):
    """The maximum itself."""

    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        return largest(values)


class SmoothMax(AbstractReduction):
    """Log-sum-exp at a temperature relative to the largest value.

    With t = temperature * max, max <= t * logsumexp(values / t) <= max * (1 + temperature * log(items)),
    so the value tends to the maximum linearly in the temperature. Zeros reduce to 0.
    """

    temperature: Float[Array, ""] = eqx.field(converter=as_number)

    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        most = largest(values)[..., None]
        busy = most > 0
        scale = self.temperature * jnp.where(busy, most, 1)
        smooth = scale * jax.nn.logsumexp(values / scale, axis=-1, keepdims=True)
        return jnp.where(busy, smooth, 0)[..., 0]


# Whether a share counts as present, exactly or smoothly, and how presences unite.
#
# Both supports turn shares into *amounts* that add up, and sums of amounts into the presence of at least one. Hard:
# amount = 1 where share > 0, presence = min(sum, 1). Soft: amount = share / width, presence = 1 - exp(-sum). As the
# width goes to 0 the soft presence goes to the hard one. So does the soft step to the hard one.


class AbstractSupport(eqx.Module):
    """How shares become presence in [0, 1]."""

    @abc.abstractmethod
    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Additive amount of presence of each share."""

    @abc.abstractmethod
    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Presence in [0, 1] of a sum of amounts."""

    @abc.abstractmethod
    def step(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """1 where the value is above 0, else 0."""

    @abc.abstractmethod
    def of(self, rows: Int[Array, "*rows"]) -> "AbstractSupport":
        """The support for values picked by row, where it differs between rows of shares."""

    def union(self, parts: Float[Array, "token part node"]) -> Float[Array, "token node"]:
        """Presence of any of several parts in [0, 1], which are taken to be independent of each other."""
        return 1 - jnp.prod(1 - parts, axis=1)


class HardSupport(AbstractSupport):
    """Present where the share is above zero."""

    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return (share > 0).astype(share.dtype)

    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jnp.minimum(amount, 1)

    def step(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return (value > 0).astype(value.dtype)

    def of(self, rows: Int[Array, "*rows"]) -> "HardSupport":
        return self


class SoftSupport(AbstractSupport):
    """Present to the degree 1 - exp(-share / width); the width broadcasts against the shares."""

    width: Float[Array, "..."] = eqx.field(converter=as_number)

    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return share / self.width

    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return 1 - jnp.exp(-amount)

    def step(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jax.nn.sigmoid(value / self.width)

    def of(self, rows: Int[Array, "*rows"]) -> "SoftSupport":
        return SoftSupport(self.width[rows]) if self.width.ndim else self


# One of several options for each row: its number, or relaxed a distribution over all of them. For many rows looking up
# by number is several times faster on CPUs than a product with a matrix of ones and zeros.

OneOf = Int[Array, " _"] | Float[Array, "_ option"]  # [row] or [row, option]
KEPT_OPTIONS = 256  # tables of at most so many rows are kept for many looks
FEW_OPTIONS = 16  # up to which products with ones and zeros are quicker than adding up rows


def is_number(one: OneOf) -> bool:
    """Whether options are numbers, not distributions."""
    return jnp.issubdtype(one.dtype, jnp.integer)


def as_weights(one: OneOf, options: int, dtype: DTypeLike) -> Float[Array, "row option"]:
    """1 at the option of every row; a distribution as it is."""
    return jax.nn.one_hot(one, options, dtype=dtype) if is_number(one) else one


def look_up(one: OneOf, table: Float[Array, "option column"]) -> Float[Array, "row column"]:
    """The table's row of every option; under a distribution their mean. The table is finite."""
    if not is_number(one):
        return one @ table
    if len(table) <= KEPT_OPTIONS:
        # The product changes nothing, but without it XLA works out what is in the table again at every look.
        table = jnp.matmul(jnp.eye(len(table), dtype=table.dtype), table, precision=jax.lax.Precision.HIGHEST)
    return table.at[one].get(mode="clip")


def added_up(
    values: Float[Array, "row column"], one: Int[Array, " row"], options: int
) -> Float[Array, "option column"]:
    """The sum of the rows of every option; a row below 0 is of none."""
    if options <= FEW_OPTIONS:
        return (values.T @ jax.nn.one_hot(one, options, dtype=values.dtype)).T
    return jax.ops.segment_sum(values, one, options)


@jax.custom_vjp
def sums_of_rows(table: Float[Array, "option column"], chosen: Int[Array, "row choice"]) -> Float[Array, "row column"]:
    """Sum of the table's rows of all choices of each row; a choice below 0 is none.

    A product with a matrix of ones and zeros does many times as much where few of many options are chosen. The sum is
    made in one pass, and its derivative in place: the automatic one adds up a table for every choice.
    """
    columns = _columns_of(chosen, len(table))
    return functools.reduce(jnp.add, (table.at[each].get(mode="fill", fill_value=0) for each in columns))


def _columns_of(chosen: Int[Array, "row choice"], options: int) -> Int[Array, "choice row"]:
    """Choices, those that are none beyond all options: below 0 would count from the end."""
    return jnp.where(chosen < 0, options, chosen).T


def _sums_of_rows_forward(table, chosen):
    return sums_of_rows(table, chosen), (table, chosen)


def _sums_of_rows_backward(known, change):
    table, chosen = known
    sums = jnp.zeros_like(table)
    for each in _columns_of(chosen, len(table)):
        sums = sums.at[each].add(change, mode="drop")
    return sums, None


sums_of_rows.defvjp(_sums_of_rows_forward, _sums_of_rows_backward)


# Entropic transport between two margins, in the log domain.


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


# Annealing schedules.

Progress = Float[np.ndarray, "..."] | float


def geometric(start: float, stop: float, progress: Progress) -> Progress:
    """From `start` at progress 0 to `stop` at progress 1, by equal ratios."""
    return start * (stop / start) ** progress


# The largest K of many numbers, exactly or smoothly.


def soft_top_k(
    values: Float[Array, "*batch item"], k: int, temperature: Float[Array, ""] | float
) -> Float[Array, "*batch item"]:
    """How far each item is among the largest `k`: sigmoid((value - threshold) / temperature), which sum to k.

    As the temperature goes to 0 this goes to 1 for the largest k and 0 for all others, where no two values at the
    border are equal. The threshold is found by bisection and one Newton step, through which the derivative passes.
    """
    if k == values.shape[-1]:
        return jnp.ones_like(values)
    fixed = jax.lax.stop_gradient(values)
    ordered, _ = jax.lax.top_k(fixed, k + 1)
    reach = temperature * jnp.log(1.0 * values.shape[-1]) + jnp.finfo(values.dtype).tiny
    # Where the k-th stands that far above the threshold, k of them count nearly 1 each; and the other way round.
    low, high = ordered[..., -1:] - 2 * reach, ordered[..., k - 1 : k] + 2 * reach

    def halved(_, border):
        low, high = border
        middle = (low + high) / 2
        over = jax.nn.sigmoid((fixed - middle) / temperature).sum(axis=-1, keepdims=True) > k
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    low, high = jax.lax.fori_loop(0, BISECTIONS, halved, (low, high))
    threshold = (low + high) / 2
    part = jax.nn.sigmoid((values - threshold) / temperature)
    slope = jax.lax.stop_gradient((part * (1 - part)).sum(axis=-1, keepdims=True)) / temperature
    threshold += (part.sum(axis=-1, keepdims=True) - k) / jnp.maximum(slope, jnp.finfo(values.dtype).tiny)
    return jax.nn.sigmoid((values - threshold) / temperature)


BISECTIONS = 12


def straight_through(exact: Float[Array, "*shape"], smooth: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact value, with the derivative of the smooth one."""
    return smooth + jax.lax.stop_gradient(exact - smooth)
