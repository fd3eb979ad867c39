"""Main effects and two-way interactions: which part of a metric's variance over a study each axis explains.

The metric is written as a sum of functions of one axis and of two axes, by least squares on functions that are
orthonormal over an axis: contrasts between the values of a list, Legendre polynomials of a range that numbers are drawn
from. The part of an axis is the sum of its squared coefficients. On a complete grid these are the shares of the
analysis of variance; on drawn numbers they are Sobol indices by polynomial chaos (B. Sudret, Global sensitivity
analysis using polynomial chaos expansions, Reliability Engineering & System Safety 93, 2008). These are the points that
the study has, drawn in some axes and a grid in others, with holes where conditions are or cases that cannot be;
`scipy.stats.sobol_indices` would need points of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.metrics import Row, column_of, is_finite
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import Space, SweepError

DEGREE = 4  # of the polynomials
SPARE = 2  # points for each function that is fitted, where they are no complete grid
MOST = 50_000  # points that are taken into account; of more, so many are drawn

Basis = Float[np.ndarray, "point _"]  # a column for each function


@dataclass(frozen=True)
class Effects:
    """Shares of variance; with `rest`, which effects of three axes and finer ones have, they sum to 1.

    `pairs` is symmetric, with zeros on its diagonal; NaN where there are too few points to tell.
    """

    metric: str
    logarithm: bool  # whether shares are of the metric's logarithm: of one that is always above 0
    points: int
    axes: tuple[str, ...]  # zipped ones are one
    main: Float[np.ndarray, " axis"]
    pairs: Float[np.ndarray, "axis axis"]
    rest: float

    @property
    def total(self) -> Float[np.ndarray, " axis"]:
        """Of an axis, alone and with each other one."""
        return self.main + self.pairs.sum(axis=1)


def effects(space: Space, points: Sequence[Point], rows: Sequence[Row], name: str) -> Effects:
    """Effects of the axes on a metric, over points that have it and can be compared.

    Times act by factors, so shares are of logarithms where all values are above 0. Raises `SweepError` where too few
    points have the metric, no axis has two values, or the metric is the same everywhere.
    """
    column = column_of(name)
    able = [at for at, row in enumerate(rows) if row["comparable"] and is_finite(row[column])]
    if len(able) > MOST:
        able = sorted(np.random.default_rng(0).choice(able, MOST, replace=False))
    values = np.array([rows[at][column] for at in able])
    logarithm = bool(len(values)) and bool((values > 0).all())
    values = np.log(values) if logarithm else values
    bases = {axis: basis for axis, basis in _bases(space, [points[at] for at in able]).items() if basis.shape[1]}
    if not bases:
        raise SweepError(f"{space.label}: no axis has two values among points with {name}, so there are no effects")
    if np.ptp(values) <= 1e-6 * np.abs(values).max():  # times are float32
        raise SweepError(f"{space.label}: {name} is the same at all points, so there are no effects")
    main, pairs, rest = shares([*bases.values()], values)
    return Effects(name, logarithm, len(values), tuple(bases), main, pairs, rest)


def shares(
    bases: Sequence[Basis], values: Float[np.ndarray, " point"]
) -> tuple[Float[np.ndarray, " axis"], Float[np.ndarray, "axis axis"], float]:
    """Shares of the variance by axis, by two axes and what is left, from orthonormal functions of every axis.

    Where they are not orthonormal over the points, what chance alone would give them is taken off. Raises `SweepError`
    where there are too few points to tell main effects, or axes that go together.
    """
    blocks: dict[tuple[int, ...], Basis] = {(axis,): basis for axis, basis in enumerate(bases)}
    couples = [*combinations(range(len(bases)), 2)]
    sizes = [basis.shape[1] for basis in bases]
    alone, both = 1 + sum(sizes), 1 + sum(sizes) + sum(sizes[a] * sizes[b] for a, b in couples)
    pairs, count = np.zeros((len(bases),) * 2), len(values)
    products: dict[tuple[int, ...], Basis] = (
        {} if both > count else {(a, b): _products(bases[a], bases[b]) for a, b in couples}
    )
    enough = both <= count / SPARE or (both <= count and _is_orthonormal([*bases, *products.values()]))
    if enough and _is_independent([*bases, *products.values()]):
        blocks.update(products)
    elif not (alone <= count / SPARE or (alone <= count and _is_orthonormal(bases))):
        raise SweepError(f"{count} points are too few to tell effects apart; give at least {SPARE * alone}")
    elif not _is_independent(bases):
        raise SweepError("some axes go together, so their effects cannot be told apart; zip them, or leave some out")
    else:
        pairs[~np.eye(len(bases), dtype=bool)] = np.nan
    matrix = np.concatenate([np.ones((count, 1)), *blocks.values()], axis=1)
    coefficients, *_ = np.linalg.lstsq(matrix, values - values.mean(), rcond=None)
    residual = values - values.mean() - matrix @ coefficients
    chance = np.zeros(matrix.shape[1])  # of every coefficient's square
    if not _is_orthonormal([*blocks.values()]):
        noise = float((residual**2).sum()) / max(count - matrix.shape[1], 1)
        chance = noise * np.diag(np.linalg.inv(matrix.T @ matrix))
    ends = np.cumsum([1, *(block.shape[1] for block in blocks.values())])
    squares = [float((coefficients[a:b] ** 2).sum()) for a, b in pairwise(ends)]
    whole = sum(squares) + float(np.mean(residual**2))
    main = np.zeros(len(bases))
    told = [max(s - chance[a:b].sum(), 0.0) / whole for s, (a, b) in zip(squares, pairwise(ends), strict=True)]
    for axes, part in zip(blocks, told, strict=True):
        if len(axes) == 1:
            main[axes[0]] = part
        else:
            pairs[axes] = pairs[axes[::-1]] = part
    return main, pairs, 1 - sum(told)


def _products(one: Basis, other: Basis) -> Basis:
    return np.einsum("pi,pj->pij", one, other).reshape(len(one), -1)


def _is_orthonormal(blocks: Sequence[Basis]) -> bool:
    """Whether the functions are orthonormal over the points themselves, as on a complete grid."""
    matrix = np.concatenate(blocks, axis=1)
    return bool(np.allclose(matrix.T @ matrix / len(matrix), np.eye(matrix.shape[1]), atol=1e-6))


def _is_independent(blocks: Sequence[Basis]) -> bool:
    """Whether no function is a sum of others and a constant: holes may leave too little to tell them apart."""
    matrix = np.concatenate([np.ones((len(blocks[0]), 1)), *blocks], axis=1)
    return bool(np.linalg.matrix_rank(matrix) == matrix.shape[1])


def _bases(space: Space, points: Sequence[Point]) -> dict[str, Basis]:
    """Functions of every axis; none of those with a single value."""
    bases = {}
    for keys, drawn in space.units():
        values = [tuple(point.values[key] for key in keys) for point in points]
        if drawn and len(set(values)) > DEGREE:
            bases[" and ".join(keys)] = legendre(space.place(keys[0], np.array([first for first, *_ in values], float)))
        else:
            bases[" and ".join(keys)] = contrasts(values)
    return bases


def contrasts(values: Sequence[object]) -> Basis:
    """Functions of a list's values, one fewer than there are; orthonormal where all are equally frequent."""
    names = [repr(value) for value in values]
    kinds = list(dict.fromkeys(names))
    step = np.eye(len(kinds))
    step[:, 0] = 1
    functions = np.linalg.qr(step)[0][:, 1:] * np.sqrt(len(kinds))
    return functions[[kinds.index(name) for name in names]]


def legendre(part: Float[np.ndarray, " point"]) -> Basis:
    """Polynomials of parts of a range, 0 to 1; orthonormal where these are uniform."""
    degrees = np.arange(1, DEGREE + 1)
    return np.polynomial.legendre.legvander(2 * part - 1, DEGREE)[:, 1:] * np.sqrt(2 * degrees + 1)
