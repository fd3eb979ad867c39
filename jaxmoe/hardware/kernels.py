"""Kernel models: how well a die multiplies matrices, that is, what an expert's FFN takes beyond its FLOPs."""

import abc
import csv
import math
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Array, Float, Int

from jaxmoe.errors import InputError
from jaxmoe.relax import as_number


class GemmError(InputError):
    """Measured times that cannot be used, with the reason and the remedy."""


Nodes = Int[np.ndarray, " gemm"]
Tokens = Int[np.ndarray, " gemm"]
Parts = Float[np.ndarray, " gemm"]
Seconds = Float[np.ndarray, " gemm"]
Witness = Callable[[Nodes, Tokens, Parts], Seconds]
"""Seconds of the products of an expert at a node, from its tokens and the part of the expert there."""


class AbstractGemm(eqx.Module):
    """A kernel model: seconds of expert FFNs on a die, by their shapes.

    Registered in `jaxmoe.registry.KERNEL_MODELS`.
    """

    @property
    def within_rate(self) -> bool:
        """Whether no product is faster than at the die's rate, so that FLOPs over the rate bound its time."""
        return False

    @property
    def most_rows(self) -> float:
        """Tokens up to which times are known."""
        return math.inf

    @abc.abstractmethod
    def seconds(
        self,
        rows: Float[Array, "*shape"],
        part: Float[Array, "*shape"],
        present: Float[Array, "*shape"],
        flops: Float[Array, "..."],
        columns: Float[Array, ""],
        gemms: Float[Array, ""],
    ) -> Float[Array, "*shape"]:
        """Seconds of `rows` tokens through `part` of an expert of so many `columns` (intermediate size).

        One token and whole expert takes `gemms` products and 1 / `flops` seconds at the die's rate. `present` is 1
        where the node computes the expert at all, or between when relaxed.
        """

    def node_seconds(
        self,
        rows: Float[Array, "copy node"],
        part: Float[Array, "copy node"],
        present: Float[Array, "copy node"],
        flops: Float[Array, " node"],
        columns: Float[Array, ""],
        gemms: Float[Array, ""],
    ) -> Float[Array, " node"]:
        """Seconds of all experts of every node, one after the other. A kernel that fuses them overrides this."""
        return self.seconds(rows, part, present, flops, columns, gemms).sum(axis=0)

    def witness(self, flops: Float[np.ndarray, " node"], columns: float, gemms: float) -> Witness | None:
        """Times for the event simulator in plain NumPy, which share no formula with `seconds`; arguments are as there.

        `None` where there are none: the simulator then takes those of `seconds`, which is no test of these.
        """
        return None


class TiledGemm(AbstractGemm):
    """Whole tiles are computed, and every product starts up anew.

    The FLOPs count as if rows and columns were whole multiples of a tile; gradients pass as if they were not rounded.
    """

    tile_rows: Float[Array, ""] = eqx.field(converter=as_number)
    tile_columns: Float[Array, ""] = eqx.field(converter=as_number)
    startup: Float[Array, ""] = eqx.field(converter=as_number)  # s of each product

    @property
    def within_rate(self) -> bool:
        return True

    def seconds(self, rows, part, present, flops, columns, gemms):
        whole = _rounded_up(rows, self.tile_rows) * _rounded_up(part * columns, self.tile_columns) / columns
        return whole / flops + present * gemms * self.startup

    def witness(self, flops, columns, gemms):
        tall, wide, startup = float(self.tile_rows), float(self.tile_columns), float(self.startup)
        of_tile = tall * wide / (columns * flops)

        def timed(node: Nodes, tokens: Tokens, part: Parts) -> Seconds:
            tiles = np.ceil(tokens / tall) * np.ceil(part * columns / wide - 1e-5)  # shares are float32
            return tiles * of_tile[node] + gemms * startup

        return timed


class MeasuredGemm(AbstractGemm):
    """Measured seconds of an expert FFN, all its products, on a grid of rows and columns.

    Between grid points times are interpolated linearly in both; below the first they are those of the first.
    """

    rows: Float[Array, " row"]
    columns: Float[Array, " column"]
    table: Float[Array, "row column"]  # s

    @property
    def most_rows(self) -> float:
        return float(self.rows[-1])

    def seconds(self, rows, part, present, flops, columns, gemms):
        return present * _interpolated(self.rows, self.columns, self.table, rows, part * columns)

    def witness(self, flops, columns, gemms):
        axes, table = [np.asarray(axis, float) for axis in (self.rows, self.columns)], np.asarray(self.table, float)
        # A grid of one point is as good as one of two that are alike.
        for side, axis in enumerate(axes):
            if len(axis) == 1:
                axes[side], table = np.array([axis[0], axis[0] + 1]), np.repeat(table, 2, axis=side)
        lookup = scipy.interpolate.RegularGridInterpolator(tuple(axes), table)

        def timed(node: Nodes, tokens: Tokens, part: Parts) -> Seconds:
            given = zip((tokens, part * columns), axes, strict=True)
            return lookup(np.stack([np.clip(value, axis[0], axis[-1]) for value, axis in given], axis=-1))

        return timed


def read_gemm_table(path: Path, largest_rows: float, largest_columns: float) -> MeasuredGemm:
    """Read a CSV with the columns `tokens,columns,seconds`: every combination of tokens and columns once.

    Raises `GemmError` for a file that is no such grid, or does not reach `largest_rows` and `largest_columns`.
    """
    points = _read_points(path)
    rows, columns = (np.unique([point[axis] for point in points]) for axis in (0, 1))
    table = np.full((len(rows), len(columns)), np.nan)
    for tokens, width, seconds in points:
        at = np.searchsorted(rows, tokens), np.searchsorted(columns, width)
        if not np.isnan(table[at]):
            raise GemmError(f"{path}: has two times for {tokens:g} tokens and {width:g} columns; keep one")
        table[at] = seconds
    if np.isnan(table).any():
        row, column = np.argwhere(np.isnan(table))[0]
        raise GemmError(
            f"{path}: has no time for {rows[row]:g} tokens and {columns[column]:g} columns; measure every combination"
        )
    for name, axis, needed in (("tokens", rows, largest_rows), ("columns", columns, largest_columns)):
        if axis[-1] < needed:
            raise GemmError(
                f"{path}: goes up to {axis[-1]:g} {name}, but this run needs up to {needed:g}; measure larger ones"
            )
    return MeasuredGemm(*(jnp.asarray(array, jnp.float32) for array in (rows, columns, table)))


def _read_points(path: Path) -> list[tuple[float, float, float]]:
    names = ("tokens", "columns", "seconds")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GemmError(f"{path}: cannot be read as a CSV file ({error}); give one with {', '.join(names)}") from None
    if not lines or not set(names) <= set(lines[0]):
        raise GemmError(f"{path}: has no lines with the columns {', '.join(names)}; write them in its first line")
    points = []
    for number, line in enumerate(lines, start=2):
        try:
            point = tuple(float(line[name]) for name in names)
        except (TypeError, ValueError):
            point = (np.nan,) * 3
        if not (np.isfinite(point).all() and min(point) > 0):
            raise GemmError(f"{path}: line {number} is {list(line.values())}, expected three numbers above zero")
        points.append(point)
    return points  # type: ignore[return-value]


def _rounded_up(value: Float[Array, "*shape"], tile: Float[Array, ""]) -> Float[Array, "*shape"]:
    """The next whole multiple; its gradient is that of the value."""
    # A value that is a multiple but for rounding is one.
    up = jnp.ceil(value / tile - 1e-5) * tile
    return value + jax.lax.stop_gradient(up - value)


def _interpolated(
    x: Float[Array, " row"],
    y: Float[Array, " column"],
    table: Float[Array, "row column"],
    at_x: Float[Array, "*shape"],
    at_y: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    def place(grid: Array, value: Array) -> tuple[Array, Array]:
        below = jnp.clip(jnp.searchsorted(grid, value, side="right") - 1, 0, max(grid.shape[0] - 2, 0))
        above = jnp.minimum(below + 1, grid.shape[0] - 1)
        width = jnp.where(above > below, grid[above] - grid[below], 1)
        return below, jnp.clip((value - grid[below]) / width, 0, 1)

    (i, u), (j, v) = place(x, at_x), place(y, at_y)
    i1, j1 = jnp.minimum(i + 1, x.shape[0] - 1), jnp.minimum(j + 1, y.shape[0] - 1)
    low = table[i, j] * (1 - v) + table[i, j1] * v
    high = table[i1, j] * (1 - v) + table[i1, j1] * v
    return low * (1 - u) + high * u
