"""Meshes cut into equal rectangles, and rings through these. Needs no JAX: configurations are checked with it."""

import numpy as np


def blocks(shape: tuple[int, int], count: int) -> np.ndarray:
    """Cut the mesh into `count` equal rectangles, as near to square as they come: block of a node, int [node]."""
    return cut_blocks(shape, square_cut(shape, count))


def square_cut(shape: tuple[int, int], count: int) -> tuple[int, int]:
    """How often to cut along x and along y for `count` equal rectangles, as near to square as they come.

    Raises `ValueError` when no cut into equal rectangles exists.
    """
    x, y = shape
    cuts = [(i, count // i) for i in range(1, count + 1) if count % i == 0 and x % i == 0 and y % (count // i) == 0]
    if not cuts:
        raise ValueError(f"a {x}x{y} mesh cannot be cut into {count} equal rectangles")
    return min(cuts, key=lambda cut: abs(x // cut[0] - y // cut[1]))


def cut_blocks(shape: tuple[int, int], cut: tuple[int, int]) -> np.ndarray:
    """Cut the mesh into so many equal rectangles along x and along y: block of a node, int [node].

    Raises `ValueError` where a side is not a multiple.
    """
    (x, y), (across, along) = shape, cut
    if x % across or y % along:
        sides = [", ".join(str(n) for n in range(1, side + 1) if side % n == 0) for side in shape]
        raise ValueError(
            f"a {x}x{y} mesh cannot be cut into {across}x{along} equal rectangles; cut x into one of {sides[0]} and "
            f"y into one of {sides[1]}"
        )
    row, column = np.unravel_index(np.arange(x * y), shape)
    return (row // (x // across)) * along + column // (y // along)


def ring_order(shape: tuple[int, int], nodes: np.ndarray) -> np.ndarray:
    """Order the nodes of one rectangle into a ring whose neighbours are neighbours in the mesh.

    A rectangle with an even side longer than one has such a cycle: out along the first column or row, back
    through the rest as a snake. Others get the snake alone, whose last step leads back over several links.
    """
    x, y = np.unravel_index(np.sort(nodes), shape)
    grid = np.sort(nodes).reshape(len(np.unique(x)), len(np.unique(y)))
    if grid.shape[0] % 2 and grid.shape[1] % 2 == 0:
        grid = grid.T
    if min(grid.shape) == 1 or grid.shape[0] % 2:
        return np.concatenate([row[:: 1 if i % 2 == 0 else -1] for i, row in enumerate(grid)])
    snake = [row[1:][:: 1 if i % 2 == 0 else -1] for i, row in enumerate(grid)]
    return np.concatenate([*snake, grid[::-1, 0]])
