"""How long products take, told to the event simulator in plain NumPy: it shares no formula with the model."""

from collections.abc import Callable

import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Float, Int

from jaxmoe.hardware.gemm import AbstractGemm, MeasuredGemm, TiledGemm
from jaxmoe.latency import LayerModel

Nodes = Int[np.ndarray, " gemm"]
Tokens = Int[np.ndarray, " gemm"]
Parts = Float[np.ndarray, " gemm"]
Seconds = Float[np.ndarray, " gemm"]


def simulated_gemm(model: LayerModel) -> Callable[[Nodes, Tokens, Parts], Seconds] | None:
    """Seconds of the products of an expert at a node, from its tokens and the part of the expert there.

    `None` where a die multiplies at its full rate. Raises `TypeError` for a kind of product that is not known here.
    """
    gemm, columns = model.machine.die.gemm, float(model.costs.columns)
    if gemm is None:
        return None
    if isinstance(gemm, MeasuredGemm):
        return _measured(gemm, columns)
    if isinstance(gemm, TiledGemm):
        per_column = float(model.costs.flops_per_token_expert) / columns
        return _tiled(gemm, columns, float(model.costs.gemms), per_column / np.asarray(model.machine.die.flops, float))
    return _unknown(gemm)


def _tiled(gemm: TiledGemm, columns: float, gemms: float, seconds: Float[np.ndarray, " node"]):
    """`seconds` are of a token and a column, by node."""
    tall, wide, startup = float(gemm.tile_rows), float(gemm.tile_columns), float(gemm.startup)

    def timed(node: Nodes, tokens: Tokens, part: Parts) -> Seconds:
        tiles = np.ceil(tokens / tall) * np.ceil(part * columns / wide - 1e-5)  # shares are float32
        return tiles * tall * wide * seconds[node] + gemms * startup

    return timed


def _measured(gemm: MeasuredGemm, columns: float):
    axes = [np.asarray(axis, float) for axis in (gemm.rows, gemm.columns)]
    # A grid of one point is as good as one of two that are alike.
    table = np.asarray(gemm.table, float)
    for side, axis in enumerate(axes):
        if len(axis) == 1:
            axes[side], table = np.array([axis[0], axis[0] + 1]), np.repeat(table, 2, axis=side)
    lookup = scipy.interpolate.RegularGridInterpolator(tuple(axes), table)

    def timed(node: Nodes, tokens: Tokens, part: Parts) -> Seconds:
        points = [np.clip(value, axis[0], axis[-1]) for value, axis in zip((tokens, part * columns), axes, strict=True)]
        return lookup(np.stack(points, axis=-1))

    return timed


def _unknown(gemm: AbstractGemm):
    raise TypeError(f"the event simulator does not know {type(gemm).__name__}; tell it how long such products take")
