"""Where tokens live: tensor-parallel groups, their rings, full token domains, and who fetches where (moentwine IV).

Attention runs in data-parallel groups of `tp` devices. After the all-reduce every member of a group holds all tokens of
its group. A *full token domain* (FTD) is a least set of devices that together hold all tokens: one of every group. A
device of the experts fetches tokens from the members of its own domain, or from the nearest member of every group, and
returns its results to where it fetched them. A description only: `jaxmoe.network.token_communication` says what it
costs, and the event simulator carries it out on its own.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.errors import InputError
from jaxmoe.hardware.cuts import grid_ring, has_unit_ring
from jaxmoe.hardware.networks import hop_counts

Shape = tuple[int, int]
LayoutName = Literal["baseline", "er", "her", "esp", "baseline_esp"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)
FETCHES = ("domain", "nearest")


class TokenLayoutError(InputError):
    """A token layout that cannot be, with the reason and the remedy."""


@dataclass(frozen=True)
class TokenLayout:
    """Where tokens live on the devices of a mesh of `shape`, made of wafers of shape `wafer`.

    With `gathered` every member of a group has all tokens of the group; without the all-gather each of R members keeps
    1/R of them (Fig. 9). With `on_every_wafer` the devices of equal place on all wafers gather what their members have,
    so that every wafer holds all tokens (Fig. 10c).
    """

    name: str
    shape: Shape
    wafer: Shape
    group: Int[np.ndarray, " node"]
    ring: Int[np.ndarray, "group member"]  # members in the order of their ring
    domain: Int[np.ndarray, " node"]
    fetch: Int[np.ndarray, "group node"]  # the member from which a device fetches the group's tokens
    gathered: bool = True
    on_every_wafer: bool = False

    @property
    def tp(self) -> int:
        """Devices of a group."""
        return self.ring.shape[1]

    @property
    def num_groups(self) -> int:
        return self.ring.shape[0]

    @property
    def num_nodes(self) -> int:
        return len(self.group)

    @property
    def sliced(self) -> bool:
        """Whether experts are sliced over several devices (moentwine VI-B5)."""
        return self.name.endswith("esp")

    @property
    def parts(self) -> Int[np.ndarray, "group part node"]:
        """The holders from which a device fetches equal parts of a group's tokens: one, or all members."""
        if self.gathered:
            return self.fetch[:, None]
        if not self.on_every_wafer:
            return np.broadcast_to(self.ring[:, :, None], (*self.ring.shape, self.num_nodes))
        return _on_wafer(self.shape, self.wafer, self.ring[:, :, None], np.arange(self.num_nodes))

    @property
    def wafer_rings(self) -> Int[np.ndarray, "ring wafer"]:
        """The devices of equal place on all wafers, in the order of their ring."""
        grid = self.shape[0] // self.wafer[0], self.shape[1] // self.wafer[1]
        return _tiles(self.shape, self.wafer).T[:, grid_ring(*grid)]

    @property
    def slices(self) -> Int[np.ndarray, " node"]:
        """The devices that share slices of the same experts: a domain, or for the baseline a tile of neighbours."""
        if self.name != "baseline_esp":
            return self.domain
        cut = _er_cut(self.shape, self.tp)
        return _tile(self.shape, (self.shape[0] // cut[0], self.shape[1] // cut[1]))

    @property
    def slice_rings(self) -> Int[np.ndarray, "slice place"]:
        """Those devices in the order of a ring, over which the slices of an expert are summed up."""
        rings, slices = [], self.slices
        for index in range(slices.max() + 1):
            nodes = np.flatnonzero(slices == index)
            sides = [len(np.unique(side)) for side in np.unravel_index(nodes, self.shape)]
            rings.append(nodes[grid_ring(*sides)] if sides[0] * sides[1] == len(nodes) else nodes)
        return np.stack(rings)


def token_layout(
    name: str,
    shape: Shape,
    tp: int,
    wafer: Shape | None = None,
    fetch: str = "domain",
    all_gather: bool | None = None,
) -> TokenLayout:
    """The token layout of this name, for groups of `tp` devices on a mesh of `shape`, cut in wafers of shape `wafer`.

    - `baseline`: a group is a block of neighbours, as near to square as they come (Fig. 8b). The devices of equal
      place in all blocks are a domain.
    - `er`: tp = a b with a | X and b | Y. Domains are tiles of X/a x Y/b, and a group has the device of equal place in
      every tile: its ring steps from tile to tile (Fig. 8c, 10a). Of the possible a x b that with the smallest tile's
      perimeter; then one whose tiles have a ring of neighbours; then the shortest step.
    - `her`: `er` on each wafer for itself, scattered; then devices of equal place on all wafers gather (Fig. 10c). A
      wafer is a domain. With `all_gather` the groups gather on their wafer as well, which the paper does not do.
    - `esp`: `er` with experts sliced over the devices of a domain, which has all tokens. `baseline_esp`: `baseline`
      with experts sliced over as many tiles of neighbours, which have to fetch tokens first (VI-B5).

    `fetch` is `domain`, from the member of the device's own domain, or `nearest`, from the member of the fewest hops,
    its own domain's among equals. Without `all_gather` members keep what the reduce-scatter leaves them. Raises
    `TokenLayoutError` for anything else, naming what would do.
    """
    _check_names(name, fetch)
    wafer = wafer or shape
    _check_wafer(shape, wafer)
    if name == "her":
        if fetch != "domain":
            raise TokenLayoutError(
                "fetch is 'nearest', but under her each token is at one device of a wafer; use domain"
            )
        return hierarchical_layout(shape, token_layout("er", wafer, tp), bool(all_gather))
    gathered = all_gather is None or all_gather
    if name.startswith("baseline"):
        block = _block(shape, wafer, tp)
        groups, cut, domain = _tiles(shape, block), block, _place(shape, block)
    else:
        cut = _er_cut(shape, tp)
        tile = shape[0] // cut[0], shape[1] // cut[1]
        groups, domain = _tiles(shape, tile).T, _tile(shape, tile)
    return _layout(name, shape, wafer, groups[:, grid_ring(*cut)], domain, fetch, gathered)


def custom_layout(
    shape: Shape,
    ring: Int[np.ndarray, "group member"],
    wafer: Shape | None = None,
    fetch: str = "domain",
    name: str = "custom",
) -> TokenLayout:
    """Any mapping of devices to groups: `ring` has the members of every group in the order of their ring.

    The members of equal place are a domain. Raises `TokenLayoutError` for a mapping that does not have every device
    once.
    """
    _check_names("er", fetch)
    wafer = wafer or shape
    _check_wafer(shape, wafer)
    ring = np.asarray(ring)
    nodes, count = shape[0] * shape[1], np.bincount(ring.ravel().clip(0), minlength=shape[0] * shape[1])
    if ring.min() < 0 or ring.max() >= nodes:
        raise TokenLayoutError(f"the mapping names devices {ring.min()}..{ring.max()}; the mesh has 0..{nodes - 1}")
    for node in np.flatnonzero(count != 1)[:1].tolist():
        times = "is missing in" if count[node] == 0 else "stands more than once in"
        raise TokenLayoutError(
            f"device {node} {times} the mapping; give every device of the mesh one place in one group"
        )
    domain = np.empty(nodes, np.int64)
    domain[ring] = np.arange(ring.shape[1])
    return _layout(name, shape, wafer, ring, domain, fetch, gathered=True)


def successive_layout(clusters: int, size: int, tp: int) -> TokenLayout:
    """Groups of successive devices of a network of switches: `clusters` with `size` devices each.

    Devices fetch from the members in turn. Raises `TokenLayoutError` for groups that do not divide a cluster.
    """
    if tp < 1 or size % tp:
        legal = ", ".join(str(part) for part in range(1, size + 1) if size % part == 0)
        raise TokenLayoutError(f"tp is {tp}, which does not divide the {size} devices of a cluster; use one of {legal}")
    ring = np.arange(clusters * size).reshape(-1, tp)
    place = np.arange(clusters * size) % tp
    return _layout("successive", (clusters, size), (1, size), ring, place, "domain", gathered=True)


def hierarchical_layout(shape: Shape, local: TokenLayout, all_gather: bool = False, name: str = "her") -> TokenLayout:
    """A layout of one wafer on each of the wafers of a mesh, then gathered across them; wafers are domains."""
    wafer = local.shape
    _check_wafer(shape, wafer)
    nodes = np.arange(shape[0] * shape[1])
    corners = nodes.reshape(shape)[:: wafer[0], :: wafer[1]].ravel()
    first = _in_mesh(shape, wafer, local.ring)
    ring = np.concatenate([_on_wafer(shape, wafer, first, corner) for corner in corners])
    group = np.empty(len(nodes), np.int64)
    group[ring] = np.arange(len(ring))[:, None]
    # Within its wafer a device fetches as on one alone: there every group of every wafer has a place.
    stand = _in_mesh(shape, wafer, local.fetch)[:, _place(shape, wafer)]
    here = np.tile(_on_wafer(shape, wafer, stand, nodes), (len(corners), 1))
    return TokenLayout(name, shape, wafer, group, ring, _tile(shape, wafer), here, all_gather, on_every_wafer=True)


def _layout(
    name: str,
    shape: Shape,
    wafer: Shape,
    ring: Int[np.ndarray, "group member"],
    domain: Int[np.ndarray, " node"],
    fetch: str,
    gathered: bool,
) -> TokenLayout:
    group = np.empty(len(domain), np.int64)
    group[ring] = np.arange(len(ring))[:, None]
    fetched = np.empty((len(ring), len(domain)), np.int64)
    for index, members in enumerate(ring):
        own = domain[members][:, None] == domain
        near = hop_counts(shape)[members] * 2 - own if fetch == "nearest" else -own.astype(int)
        fetched[index] = members[near.argmin(axis=0)]
    if not gathered:
        domain = np.zeros_like(domain)  # nothing less than the mesh has all tokens
    return TokenLayout(name, shape, wafer, group, ring, domain, fetched, gathered)


# Cuts of a mesh.


def _place(shape: Shape, tile: Shape) -> Int[np.ndarray, " node"]:
    """The place of every device in its tile, row by row."""
    x, y = np.indices(shape).reshape(2, -1)
    return x % tile[0] * tile[1] + y % tile[1]


def _tile(shape: Shape, tile: Shape) -> Int[np.ndarray, " node"]:
    """The tile of every device."""
    x, y = np.indices(shape).reshape(2, -1)
    return x // tile[0] * (shape[1] // tile[1]) + y // tile[1]


def _tiles(shape: Shape, tile: Shape) -> Int[np.ndarray, "tile place"]:
    """The devices of every tile, row by row."""
    nodes = np.arange(shape[0] * shape[1]).reshape(shape[0] // tile[0], tile[0], shape[1] // tile[1], tile[1])
    return nodes.swapaxes(1, 2).reshape(-1, tile[0] * tile[1])


def _on_wafer(shape: Shape, wafer: Shape, node: np.ndarray, other: np.ndarray | np.integer) -> np.ndarray:
    """The device of the same place as `node` on the wafer of `other`."""
    (x, y), (to_x, to_y) = (np.divmod(each, shape[1]) for each in (node, other))
    return (to_x - to_x % wafer[0] + x % wafer[0]) * shape[1] + to_y - to_y % wafer[1] + y % wafer[1]


def _in_mesh(shape: Shape, wafer: Shape, node: np.ndarray) -> np.ndarray:
    """Numbers of a wafer's devices as those of the first wafer of the mesh."""
    x, y = np.divmod(node, wafer[1])
    return x * shape[1] + y


def _er_cut(shape: Shape, tp: int) -> Shape:
    """How many tiles along each side: small tiles, then a ring of neighbours, then short steps."""

    def cost(cut: Shape) -> tuple[int, bool, int]:
        tile = shape[0] // cut[0], shape[1] // cut[1]
        return sum(tile), not has_unit_ring(*cut), max(tile)

    return min(_cuts(shape, tp), key=cost)


def _block(shape: Shape, wafer: Shape, tp: int) -> Shape:
    """The sides of a group of neighbours: inside a wafer where that can be, as near to square as they come."""
    return min(
        _cuts(shape, tp),
        key=lambda block: (any(side % part for side, part in zip(wafer, block, strict=True)), abs(block[0] - block[1])),
    )


def _cuts(shape: Shape, tp: int) -> list[Shape]:
    """All a x b = tp with a | X and b | Y; whatever divides X Y has one. Raises `TokenLayoutError` for others."""
    x, y = shape
    if tp < 1 or x * y % tp:
        legal = ", ".join(str(count) for count in range(1, x * y + 1) if x * y % count == 0)
        raise TokenLayoutError(f"tp is {tp}, which does not divide the {x * y} devices of {x}x{y}; use one of {legal}")
    return [(a, tp // a) for a in range(1, tp + 1) if tp % a == 0 and x % a == 0 and y % (tp // a) == 0]


def _check_names(name: str, fetch: str) -> None:
    if name not in LAYOUTS:
        raise TokenLayoutError(f"token layout is {name!r}, expected one of {', '.join(LAYOUTS)}")
    if fetch not in FETCHES:
        raise TokenLayoutError(f"fetch is {fetch!r}, expected one of {', '.join(FETCHES)}")


def _check_wafer(shape: Shape, wafer: Shape) -> None:
    if any(part < 1 or side % part for side, part in zip(shape, wafer, strict=True)):
        raise TokenLayoutError(f"wafers of {wafer[0]}x{wafer[1]} do not tile a mesh of {shape[0]}x{shape[1]}")


def links_inside_domains(layout: TokenLayout, ends: Int[np.ndarray, "link 2"]) -> Bool[np.ndarray, " link"]:
    """Whether both ends of a link are in one domain."""
    return layout.domain[ends[:, 0]] == layout.domain[ends[:, 1]]
