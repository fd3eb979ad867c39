"""Bytes and FLOPs of the kernels of a GPU, by the shapes of their operands: products, attention, collectives."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.gpu.kernel import LEAST, Terms
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES, Sheet

Numbers = Float[Array, "..."]  # rows of any axes, or one number for all

TILE_ROWS = (8, 16, 32, 64, 128)  # of tiles that a fused kernel fills from each expert's own tokens
TILES = ((16, 64), (64, 64), (64, 128), (128, 128), (128, 256))  # rows, columns that a library may choose
# What DeepGEMM chooses from for products with scales: a tile of 256 rows has 128 columns at most. Of tiles that fill
# the machine alike it takes the widest, so they come first.
WIDTHS = (256, 192, 160, 144, *range(128, 0, -16))
EVEN_TILES = tuple((tall, wide) for wide in WIDTHS for tall in (64, 128, 256) if min(tall, wide) <= 128)
CHANGES = (1, 16, 64, 128, 256, 1024)  # rows above which libraries take another kernel


class ExpertLoads(NamedTuple):
    """Loads of experts as a fused kernel has them on one rank.

    `touched` experts have tokens, `slots` choices fall on them, `heaviest` on the one with the most. `tokens` have a
    choice there. `tiles` are those of each of `TILE_ROWS` rows that experts fill.
    """

    touched: Any  # [row]: arrays of JAX, or of NumPy where they are rebuilt
    slots: Any  # [row]
    heaviest: Any  # [row]
    tokens: Any  # [row]
    tiles: Any  # [row, tile]


def whole(value: Numbers, unit: Numbers | float | int) -> Numbers:
    """How many units hold a value, which is not negative; gradients pass as if it were not rounded."""
    parts = value / unit
    return parts + jax.lax.stop_gradient(jnp.ceil(parts - 1e-5) - parts)


def stacked(parts: Sequence[Numbers]) -> Float[Array, "*row part"]:
    """Parts of rows as their last axis."""
    return jnp.stack(jnp.broadcast_arrays(*parts), axis=-1)


def excess(value: Numbers, unit: float | int) -> Numbers:
    """Logarithm of what rounding up to a unit adds."""
    return jnp.log(whole(value, unit) * unit / value)


def _ragged(value: Numbers, unit: float | int) -> Numbers:
    """1 where a value is no multiple of a unit, else 0."""
    return jax.lax.stop_gradient(jnp.where(jnp.mod(value, unit) > 0, 1.0, 0.0))


class EvenTile(NamedTuple):
    """A tile of `tall` rows and `wide` columns, of which a product has so many `waves` and `blocks`."""

    tall: Numbers
    wide: Numbers
    waves: Numbers
    blocks: Numbers

    @property
    def shape(self) -> list[Numbers]:
        """Marks of its rate: wide tiles need more registers than there are, the more so in a single wave."""
        alone = jnp.where(self.waves == 1, 1.0, 0.0)
        kinds = [jnp.where(self.wide == wide, 1.0, 0.0) for wide in WIDTHS[:4]]
        kinds += [jnp.where(self.tall == 256, 1.0, 0.0)]
        sizes = [jnp.log(self.tall / 128), jnp.log(self.wide / 128), jnp.where(self.tall == 64, 1.0, 0.0)]
        return [*sizes, *kinds, *(alone * kind for kind in kinds)]


def even_tile(rows: Numbers, columns: Numbers, processors: Numbers) -> EvenTile:
    """DeepGEMM's tile of a product: the fewest waves, of these the fullest last one.

    As its heuristics of late 2025 for Hopper have it (deepseek-ai/DeepGEMM, MIT), but for their order among equals.
    """
    tall, wide = jnp.asarray(EVEN_TILES, jnp.float32).T
    blocks = whole(rows[..., None], tall) * whole(columns[..., None], wide)
    waves = whole(blocks, processors)
    last = blocks - (waves - 1) * processors
    best = jnp.argmin(waves * 2 * processors - last, axis=-1)
    found = (jnp.take_along_axis(part, best[..., None], axis=-1)[..., 0] for part in (waves, blocks))
    return EvenTile(tall[best], wide[best], *found)


@partial(jax.jit, static_argnames=("precision", "weight", "activation"))
def product(
    rows: Numbers, columns: Numbers, inner: Numbers, sheet: Sheet, precision: str, weight: float, activation: float
) -> Terms:
    """Terms of one product [rows, inner] by [inner, columns], with bytes of a weight and of an activation."""
    rows, columns, inner = jnp.broadcast_arrays(*(jnp.asarray(size, jnp.float32) for size in (rows, columns, inner)))
    weights = columns * inner * weight / sheet.bandwidth
    vectors = (rows * inner * activation + rows * columns * 2) / sheet.bandwidth
    of_tile = [2 * tall * wide * inner / sheet.rate(precision) * sheet.processors for tall, wide in TILES]
    waves = [whole(whole(rows, tall) * whole(columns, wide), sheet.processors) for tall, wide in TILES]
    blocks = [whole(rows, tall) * whole(columns, wide) / sheet.processors for tall, wide in TILES[1:4:2]]
    shape = [jnp.log(columns / 1024), jnp.log(inner / 1024), excess(columns, 128), excess(columns, 256)]
    shape += [excess(inner, 128), jnp.log(columns * inner / 1024**2) ** 2 / 10]
    # One row more than a multiple costs more than the next multiple does, measured: rows that do not align.
    shape += [_ragged(rows, unit) for unit in (2, 16, 64, 256)]
    shape += [_ragged(columns, 256), _ragged(inner, 256), _ragged(whole(columns, 128), 4)]
    for tall in (64, 128):
        # A library that picks columns for full waves: the fewest, counted in tiles of 128 columns.
        fits = [
            whole(whole(rows, tall) * whole(columns, wide), sheet.processors) * wide / 128
            for wide in range(16, 257, 16)
        ]
        waves.append(jnp.min(stacked(fits), axis=-1))
        of_tile.append(2 * tall * 128 * inner / sheet.rate(precision) * sheet.processors)
    even = even_tile(rows, columns, sheet.processors)
    waves.append(even.waves)
    of_tile.append(2 * even.tall * even.wide * inner / sheet.rate(precision) * sheet.processors)
    blocks.append(even.blocks / sheet.processors)
    shape += [*even.shape, *(jnp.where(rows > change, 1.0, 0.0) for change in CHANGES)]
    return Terms(
        memory=stacked([weights, vectors]),
        tiles=stacked([count * seconds for count, seconds in zip(waves, of_tile, strict=True)]),
        waves=stacked(waves),
        sizes=stacked([jnp.log(rows), *(jnp.log(count + 0.01) for count in blocks)]),
        shape=stacked(shape),
    )


MOE_TILES = ((16, 32), (16, 64), (16, 128), (32, 128), (64, 64), (64, 128), (128, 128), (128, 256))


@partial(jax.jit, static_argnames=("precision", "weight", "activation"))
def fused_moe(
    loads: ExpertLoads,
    hidden: Numbers,
    inner: Numbers,
    experts: Numbers,
    top_k: Numbers,
    gemms: Numbers | float,
    sheet: Sheet,
    precision: str,
    weight: float,
    activation: float,
) -> Terms:
    """Terms of a fused MoE kernel: the products of all `experts` of a rank, of which `loads` tell what they compute.

    `inner` is the part of the intermediate size on the rank, `gemms` how many products an expert has.
    """
    rate, bandwidth, processors = sheet.rate(precision), sheet.bandwidth, sheet.processors
    matrix = hidden * inner
    memory = [
        loads.touched * gemms * matrix * weight / bandwidth,
        loads.slots * (hidden + inner) * (activation + 2) / bandwidth,
        loads.tokens * top_k * hidden * 2 / bandwidth,
    ]
    # All tiles at once, as a last axis: this is compiled into every evaluation of a machine.
    tall, wide = jnp.asarray(MOE_TILES, jnp.float32).T
    filled = loads.tiles[..., jnp.asarray([TILE_ROWS.index(rows) for rows, _ in MOE_TILES])]
    high, broad = hidden[..., None], inner[..., None]
    up = whole(filled * whole(jnp.asarray(gemms - 1)[..., None] * broad, wide), processors)
    down = whole(filled * whole(high, wide), processors)
    tiles = (up * high + down * broad) * 2 * tall * wide * processors / rate
    of_row = gemms * 2 * matrix / rate
    padded = loads.tiles * jnp.asarray(TILE_ROWS, jnp.float32) * of_row[..., None]
    products = jnp.log(jnp.concatenate([padded, (loads.heaviest * of_row)[..., None]], axis=-1) + LEAST)
    sizes = [jnp.log(loads.touched), jnp.log(loads.slots), jnp.log(loads.tokens)]
    sizes += [jax.lax.stop_gradient(jnp.where(loads.tokens > experts, 1.0, 0.0))]  # libraries change tiles there
    shape = [jnp.log(hidden / 4096), jnp.log(inner / 1024), jnp.log(experts / 32), jnp.log(top_k / 4)]
    counts = jnp.concatenate([products, stacked(sizes)], axis=-1)
    return Terms(stacked(memory), tiles, up + down, counts, stacked(shape))


QUERY_TILES = (64, 128, 256)  # rows of queries of a tile
KEY_BLOCKS = (64, 256, 1024, 4096)  # keys that a processor takes at a time while generating
SHARING = 32  # heads that share the keys that they read
KNOTS = (1e-4, 1e-2, 0.1, 1.0, 10.0)  # MB: where a collective may change its protocol


class Heads(NamedTuple):
    """Heads of attention on one GPU: those of queries, those of keys and values, and the sizes of a key and a value.

    A token sees `window` tokens before it, or with 0 all of them.
    """

    queries: Numbers
    kv: Numbers
    key_size: float | int | Numbers
    value_size: float | int | Numbers
    window: Numbers

    @property
    def group(self) -> Numbers:
        """Heads that share keys."""
        return self.queries / self.kv

    @property
    def size(self) -> Any:
        """Numbers of a key and a value."""
        return self.key_size + self.value_size

    def seen(self, cached: Numbers) -> Numbers:
        """How many of the cached tokens a new one sees."""
        return jnp.where(self.window > 0, jnp.minimum(self.window, cached), cached)

    def shape(self, vector: Any) -> list[Numbers]:
        """What stays of them as tokens grow, with the numbers of a cached token."""
        windowed = jnp.where(self.window > 0, 1.0, 0.0)
        logs = [jnp.log(self.queries / 16), jnp.log(self.kv / 4), jnp.log(vector / 256), windowed]
        return [*logs, jnp.log(self.group), jnp.where(self.group == 1, 1.0, 0.0), jnp.log(self.window / 128 + 1) / 4]


@partial(jax.jit, static_argnames=("precision", "cache"))
def prefill(batch: Numbers, tokens: Numbers, heads: Heads, sheet: Sheet, precision: str, cache: float) -> Terms:
    """Terms of causal attention of new tokens, with `cache` bytes of a cached number.

    Where groups of heads share keys, their queries share tiles.
    """
    rate, bandwidth, processors = sheet.rate(precision), sheet.bandwidth, sheet.processors
    seen, size = heads.seen(tokens), heads.size
    memory = [batch * tokens * heads.queries * size * 2 / bandwidth]
    memory += [batch * tokens * heads.kv * size * (2 + cache) / bandwidth]
    tiles, waves, sizes = [], [], []
    for rows in QUERY_TILES:
        # A tile of queries sees the keys before it, up to its window, and its own triangle in whole.
        pairs = seen * (tokens - seen) + seen * (seen + rows) / 2
        blocks = batch * heads.queries * whole(tokens, rows)
        work = batch * heads.queries * whole(tokens, rows) * rows / tokens * pairs * 2 * size / rate
        longest = rows * (seen + rows) * 2 * size / rate * processors
        count = whole(blocks, processors)
        tiles.append(jnp.maximum(work, longest))
        waves.append(count)
        sizes += [jnp.log(longest + LEAST), jnp.log(blocks / processors + 0.01)]
    packed = [batch * heads.kv * whole(tokens * heads.group, rows) / processors for rows in QUERY_TILES]
    sizes += [jnp.log(value + 0.01) for value in packed] + [jnp.log(tokens), jnp.log(seen), jnp.log(batch)]
    shape = [*heads.shape(size), jnp.where((heads.group > 1) & (heads.window > 0), 1.0, 0.0), size / 256 - 1]
    return Terms(*map(stacked, (memory, tiles, waves, sizes, shape)))


@partial(jax.jit, static_argnames=("precision", "cache", "latent"))
def decode(
    batch: Numbers, cached: Numbers, heads: Heads, sheet: Sheet, precision: str, cache: float, latent: bool = False
) -> Terms:
    """Terms of attention of one new token of each sequence, of which so many are `cached`.

    With `latent`, keys and values are one vector of `key_size` (MLA), else they are apart.
    """
    rate, bandwidth, processors = sheet.rate(precision), sheet.bandwidth, sheet.processors
    seen, size, group = heads.seen(cached), heads.size, heads.group
    vector = heads.key_size if latent else size
    memory = [batch * seen * heads.kv * vector * cache / bandwidth, batch * heads.queries * size * 2 / bandwidth]
    if not latent:  # heads of a larger group read their keys one by one, in some kernels
        memory.append(jnp.where(group > SHARING, batch * seen * heads.queries * vector * cache / bandwidth, 0.0))
    tiles, waves, sizes = [], [], []
    for keys in KEY_BLOCKS:
        rows = whole(group, 64) * 64
        blocks = batch * heads.kv * whole(seen, keys)
        count = whole(blocks, processors)
        tiles.append(count * processors * keys * rows * 2 * size / rate)
        waves.append(count)
        sizes.append(jnp.log(blocks / processors + 0.01))
    narrow = batch * heads.kv * whole(group, 16) * 16 * seen * 2 * size / rate
    alone = whole(batch * heads.kv, processors) * seen * vector * cache / bandwidth * processors
    sizes += [jnp.log(narrow + LEAST), jnp.log(alone + LEAST), jnp.log(seen), jnp.log(batch), jnp.log(cached)]
    shape = [*heads.shape(vector), size / 256 - 1, jnp.where(group > SHARING, 1.0, 0.0)]
    return Terms(*map(stacked, (memory, tiles, waves, sizes, shape)))


# Parts of the bytes of a message that pass a GPU's link, by the operation, for n GPUs: (a * n + b) / n.
PASSED = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}


@partial(jax.jit, static_argnames=("operation",))
def collective(operation: str, bytes_: Numbers, ranks: Numbers, sheet: Sheet) -> Terms:
    """Terms of a collective over the GPUs of a node, of so many bytes at each."""
    passed = PASSED[operation] * bytes_ * (ranks - 1) / ranks / sheet.link
    at_once = bytes_ * (ranks - 1) / sheet.link
    sizes = [jnp.log(bytes_ / 1e6 + cut) for cut in KNOTS]
    shape = [jnp.log(ranks / 4), jnp.where(ranks == 2, 1.0, 0.0)]
    memory, tiles, waves = [passed, bytes_ / sheet.bandwidth], [at_once, passed], [ranks, ranks + 0 * passed]
    return Terms(*map(stacked, (memory, tiles, waves, sizes, shape)))


# Bytes of a token's choice, its expert and weight, and of a number of a result; a dispatch has the experts' precision.
CHOICE, RESULT = 8.0, 2.0
ALL_TO_ALL = tuple(f"alltoall_{name}" for name in ("prepare", "dispatch", "combine", "combine_low_precision"))


@partial(jax.jit, static_argnames=("operation", "precision"))
def all_to_all(
    operation: str,
    precision: str,
    tokens: Numbers,
    hidden: Numbers,
    top_k: Numbers,
    copies: Numbers,
    ranks: Numbers,
    sheet: Sheet,
) -> Terms:
    """Terms of one of `ALL_TO_ALL` over the GPUs that links join, each with so many tokens.

    A token goes to `copies` of the GPUs, its own counted. What a pair of GPUs carries is a limit of its own, and each
    doubling of ranks a further round.
    """
    of_operation = {"alltoall_prepare": CHOICE * top_k, "alltoall_combine": RESULT * hidden}
    vector = of_operation.get(operation, WEIGHT_BYTES[precision] * hidden)
    sent = tokens * copies * vector
    # What comes in is copied once more, results of a token's choices are summed.
    local = (1 + top_k) * RESULT * hidden if "combine" in operation else (1 + copies) * vector
    memory = [sent * (1 - 1 / ranks) / sheet.link, tokens * local / sheet.bandwidth]
    pair, rounds = sent / ranks / sheet.link, jnp.log2(ranks)
    sizes = [jnp.log(tokens), jnp.log(whole(tokens, sheet.processors))]
    beyond = jnp.where(ranks > sheet.node, 1.0, 0.0)
    return Terms(*map(stacked, (memory, [pair], [rounds + 0 * pair], sizes, [beyond])))
