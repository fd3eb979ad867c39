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


def grid_ring(across: int, along: int) -> np.ndarray:
    """A ring through all cells of a grid in steps as short as they come: cell numbers, row by row, in ring order.

    With an even side and two sides longer than one every step leads to a neighbour. There is no such cycle otherwise.
    With two odd sides longer than one, one step is diagonal; along a line steps are of two cells, but the first and
    the last.
    """
    cells = np.arange(across * along)
    if min(across, along) == 1:
        return np.concatenate([cells[::2], cells[1::2][::-1]])
    if across % 2 == 0 or along % 2 == 0:
        return ring_order((across, along), cells)
    # The rows but the last have a cycle that runs along their last row. From there it dips into the last row, two cells
    # at a time, and with the last dip into the cell that is left, whose way back is the diagonal.
    ring = ring_order((across - 1, along), cells[:-along]).tolist()
    for column in range(0, along - 1, 2):
        first, second = cells[-2 * along + column], cells[-2 * along + column + 1]
        dip = [first + along, second + along, *([cells[-1]] if column == along - 3 else [])]
        at = ring.index(first), ring.index(second)
        if at[1] == (at[0] + 1) % len(ring):
            ring[at[0] + 1 : at[0] + 1] = dip
        else:
            ring[at[1] + 1 : at[1] + 1] = dip[::-1]
    return np.array(ring)


def has_unit_ring(across: int, along: int) -> bool:
    """Whether a grid has a ring of neighbours through all cells; two cells are one, and so is a single cell."""
    return across * along <= 2 or (min(across, along) > 1 and across * along % 2 == 0)
