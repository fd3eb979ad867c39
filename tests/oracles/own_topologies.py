"""Networks as a user adds them: a class that writes the ends of links and the paths, and nothing of jaxmoe changes."""

import dataclasses
import itertools

import equinox as eqx
import numpy as np

from jaxmoe.hardware import AbstractTopology


class Dragonfly(AbstractTopology):
    """Groups of routers with a few nodes each: routers of a group are all joined, and so are all groups, by one link.

    A path takes the one link between the groups, and at most one inside each of them (Kim et al., 2008).
    """

    groups: int = eqx.field(static=True, kw_only=True)
    routers: int = eqx.field(static=True, kw_only=True)  # of a group
    terminals: int = eqx.field(static=True, kw_only=True)  # nodes of a router

    def _router(self, group: int, place: int) -> int:
        return self.groups * self.routers * self.terminals + group * self.routers + place

    def _gateway(self, group: int, towards: int) -> int:
        """The router of a group that has the link to another one."""
        return self._router(group, (towards - group) % self.groups % self.routers)

    @property
    def link_ends(self) -> np.ndarray:
        there = [(node, self._home(node)) for node in range(self.groups * self.routers * self.terminals)]
        for group in range(self.groups):
            there += itertools.combinations([self._router(group, place) for place in range(self.routers)], 2)
        for a, b in itertools.combinations(range(self.groups), 2):
            there.append((self._gateway(a, b), self._gateway(b, a)))
        return np.array(there + [(end, start) for start, end in there])

    def paths(self) -> list[list[tuple[int, ...]]]:
        link = {(start, end): number for number, (start, end) in enumerate(self.link_ends.tolist())}
        nodes = range(self.groups * self.routers * self.terminals)
        return [[tuple(link[step] for step in itertools.pairwise(self._stops(s, d))) for d in nodes] for s in nodes]

    def _home(self, node: int) -> int:
        return self._router(0, node // self.terminals)

    def _stops(self, source: int, destination: int) -> list[int]:
        """Vertices on the way, each once."""
        if source == destination:
            return []
        size = self.routers * self.terminals
        a, b = source // size, destination // size
        between = [] if a == b else [self._gateway(a, b), self._gateway(b, a)]
        stops = [source, self._home(source), *between, self._home(destination), destination]
        return [stop for stop, _ in itertools.groupby(stops)]


class PlainMesh(AbstractTopology):
    """A mesh with XY or YX paths, walked step by step, whose links have any order."""

    sides: tuple[int, int] = eqx.field(static=True, kw_only=True)
    ends: tuple[tuple[int, int], ...] = eqx.field(static=True, kw_only=True)
    columns_first: bool = eqx.field(static=True, kw_only=True, default=False)

    @property
    def num_nodes(self) -> int:
        return self.sides[0] * self.sides[1]

    @property
    def link_ends(self) -> np.ndarray:
        return np.array(self.ends, int).reshape(-1, 2)

    @property
    def grid(self) -> tuple[int, int]:
        return self.sides

    def crossed(self) -> "PlainMesh":
        return dataclasses.replace(self, columns_first=not self.columns_first)

    def paths(self) -> list[list[tuple[int, ...]]]:
        nodes = range(self.num_nodes)
        return [[self._path(source, destination) for destination in nodes] for source in nodes]

    def _path(self, source: int, destination: int) -> tuple[int, ...]:
        at, goal = list(divmod(source, self.sides[1])), divmod(destination, self.sides[1])
        path = []
        for axis in (1, 0) if self.columns_first else (0, 1):
            while at[axis] != goal[axis]:
                start = at[0] * self.sides[1] + at[1]
                at[axis] += 1 if goal[axis] > at[axis] else -1
                path.append(self.ends.index((start, at[0] * self.sides[1] + at[1])))
        return tuple(path)
