"""Exchanges by name on any network: what every token sends, path by path, and how long that takes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.hardware import AbstractTopology
from oracles.layer import Costs, Tokens, node_times, visited_nodes
from oracles.network import NumpyMachine

HOMES = ("lowest_host", "random_host", "fewest_hops", "least_loaded", "token_home")
LEAST_CONGESTED = [
    "least_congested" + meeting + route + several
    for meeting in ("", "_visited", "_token_home")
    for route in ("", "_unicast")
    for several in ("", "_by_3")
]
PRICED = ["priced", "priced_visited", "priced_token_home"]
GATHERS = [home + route for home in HOMES for route in ("", "_tree", "_cross_tree", "_split_tree")]


@dataclass
class Message:
    """So many equal messages between two nodes, each of a part or a multiple of a hidden vector."""

    source: int
    destination: int
    vectors: float
    count: float = 1.0


@dataclass
class Tree:
    """Vectors of several nodes that add up on their way to one, in the other order of directions if crossed."""

    sources: set[int]
    home: int
    vectors: float
    weight: float
    crossed: bool = False


@dataclass
class Phase:
    """Sends at once, `rounds` times over; in a chain, a list of their places, each waits for the one before it."""

    sends: list[Message | Tree]
    rounds: int = 1
    chains: list[list[int]] = field(default_factory=list)


@dataclass
class Stage:
    """Seconds of every link and port, and of all phases."""

    link_time: np.ndarray
    port_time: np.ndarray
    total: float


def reached_nodes(share: np.ndarray, tokens: Tokens, mode: str) -> list[set[int]]:
    """Nodes that every token visits."""
    return [
        {node for hosts in visited_nodes(share, tokens, token, mode) for node in hosts}
        for token in range(len(tokens.weight))
    ]


def token_homes(
    rule: str, topology: AbstractTopology, share: np.ndarray, tokens: Tokens, mode: str
) -> list[int | None]:
    """Where the results of every token meet; none for a token that is nowhere."""
    paths, nodes = topology.paths(), topology.num_nodes
    held, homes = [0.0] * nodes, []
    reached = reached_nodes(share, tokens, mode)
    somewhere = sum(weight for visited, weight in zip(reached, tokens.weight, strict=True) if visited)
    for token, visited in enumerate(reached):
        hops = {node: sum(len(paths[other][node]) for other in visited) for node in sorted(visited)}
        if not visited:
            homes.append(None)
            continue
        if rule == "lowest_host":
            homes.append(min(visited_nodes(share, tokens, token, mode)[tokens.named_choice(token)]))
        elif rule == "random_host":
            homes.append(sorted(visited)[int(np.floor(tokens.token_draw[token] * len(visited)))])
        elif rule == "fewest_hops":
            homes.append(min(hops, key=lambda node: (hops[node], node)))
        elif rule == "least_loaded":
            # Hops + 32 x tokens held over their mean at the end, in whole numbers.
            cost = {node: hops[node] * somewhere + 32 * nodes * held[node] for node in hops}
            homes.append(min(cost, key=lambda node: (cost[node], node)))
            held[homes[-1]] += tokens.weight[token]
        else:
            assert rule == "token_home"
            homes.append(tokens.living_node(token, nodes))
    return homes


def combine_phases(name: str, topology: AbstractTopology, share: np.ndarray, tokens: Tokens, mode: str) -> list[Phase]:
    """What an exchange sends in combine; dispatch sends the same backwards."""
    visits = list(zip(reached_nodes(share, tokens, mode), map(float, tokens.weight), strict=True))
    if name == "reduce_scatter":
        return [Phase(_scattered(visits))]
    if name.startswith("ring"):
        return _ring_phases(name, topology, visits)
    if name.startswith("two_level"):
        return _two_levels(int(name.split("_")[-1]), topology.num_nodes, tokens, visits)
    if name.startswith("least_congested"):
        return [Phase(_least_congested(name, topology, tokens, visits))]
    if name in PRICED:
        return [Phase(_priced(name, topology, tokens, visits))]
    rule = next(home for home in HOMES if name.startswith(home))
    route = name[len(rule) :].lstrip("_")
    sends: list[Message | Tree] = []
    homes = token_homes(rule, topology, share, tokens, mode)
    for (visited, weight), home in zip(visits, homes, strict=True):
        if home is None or weight == 0:
            continue
        if not route:
            sends += [Message(node, home, 1.0, weight) for node in visited]
        if route in ("tree", "cross_tree"):
            sends.append(Tree(visited, home, 1.0, weight, crossed=route == "cross_tree"))
        if route == "split_tree":
            sends += [Tree(visited, home, 0.5, weight, crossed) for crossed in (False, True)]
    return [Phase(sends)]


def _two_levels(groups: int, nodes: int, tokens: Tokens, visits: list[tuple[set[int], float]]) -> list[Phase]:
    """Token by token: inside each group that it visits, then from there to where it lives."""
    size = nodes // groups
    inside: list[Message | Tree] = []
    outside: list[Message | Tree] = []
    for token, (visited, weight) in enumerate(visits):
        home = tokens.living_node(token, nodes)
        for group in {node // size for node in visited} if weight else ():
            meeting = group * size + home % size
            inside += [Message(node, meeting, 1.0, weight) for node in visited if node // size == group]
            if group != home // size:
                outside.append(Message(meeting, home, 1.0, weight))
    return [Phase(inside), Phase(outside)]


def _least_congested(
    name: str, topology: AbstractTopology, tokens: Tokens, visits: list[tuple[set[int], float]]
) -> list[Message | Tree]:
    """Each token looks at every node and every order of directions, and lists the links on the way."""
    words = name.removeprefix("least_congested").split("_by_")
    at_once = int(words[1]) if len(words) > 1 else 1
    unicast = "unicast" in words[0]
    routes = [topology.paths()]
    if topology.crossed() is not None and not unicast:
        routes.append(topology.crossed().paths())
    rate = np.asarray(topology.link_rate, float)
    load, chosen = np.zeros(topology.num_links), []
    for first in range(0, len(visits), at_once):
        together = range(first, min(first + at_once, len(visits)))
        for _ in range(1 if unicast else 2):
            busy = [(carried + 0.5) / speed for carried, speed in zip(load, rate, strict=True)]
            price = [2 ** int(16 * each / max(busy) + 1 / 1024) for each in busy]
            added = np.zeros_like(load)
            for token in together:
                visited, weight = visits[token]
                able = range(topology.num_nodes)
                if "token_home" in words[0]:
                    able = [tokens.living_node(token, topology.num_nodes)]
                elif "visited" in words[0]:
                    able = sorted(visited) or able
                offers = []
                for across, paths in enumerate(routes):
                    for node in able:
                        links = [link for other in visited for link in paths[other][node]]
                        links = links if unicast else sorted(set(links))
                        offers.append((sum(price[link] for link in links), across, node, links))
                _, across, node, links = min(offers)
                np.add.at(added, links, weight)
                if weight and visited and unicast:
                    chosen += [Message(other, node, 1.0, weight) for other in visited]
                elif weight and visited:
                    chosen.append(Tree(visited, node, 0.5, weight, bool(across)))
            load += added
    return chosen


def _priced(
    name: str,
    topology: AbstractTopology,
    tokens: Tokens,
    visits: list[tuple[set[int], float]],
) -> list[Message | Tree]:
    """Each token lists every way with the links on it, and takes that in whose part of their odds its draw falls."""
    chosen: list[Message | Tree] = []
    for token, (visited, weight) in enumerate(visits):
        if not visited or not weight:
            continue
        ways = list(_way_odds(name, topology, visited, tokens, token))
        reached = np.cumsum([odds for odds, _, _ in ways])
        for half in range(2):
            number = (tokens.token_draw[token] + half / 2) % 1 * reached[-1]
            _, node, crossed = ways[next(way for way, sum_so_far in enumerate(reached) if number < sum_so_far)]
            chosen.append(Tree(visited, node, 0.5, weight, crossed))
    return chosen


def _way_odds(
    name: str, topology: AbstractTopology, visited: set[int], tokens: Tokens, token: int
) -> Iterator[tuple[float, int, bool]]:
    """How likely every way is relative to the others, its node, and whether it goes across.

    Links cost 1 at a softness of 1/2.
    """
    able: Iterable[int] = range(topology.num_nodes)
    if name == "priced_token_home":
        able = [tokens.living_node(token, topology.num_nodes)]
    elif name == "priced_visited":
        able = sorted(visited)
    for crossed, network in ((False, topology), (True, topology.crossed())):
        if network is None:
            continue
        paths = network.paths()
        for node in able:
            links = {link for other in visited for link in paths[other][node]}
            yield float(np.exp(-2.0 * len(links))), node, crossed


def _scattered(visits: list[tuple[set[int], float]]) -> list[Message | Tree]:
    """Every visited node sends each other its part; a pair's messages count as long as they are on average."""
    count: dict[tuple[int, int], float] = {}
    vectors: dict[tuple[int, int], float] = {}
    for visited, weight in visits:
        for source in visited:
            for destination in visited:
                pair = source, destination
                count[pair] = count.get(pair, 0) + weight
                vectors[pair] = vectors.get(pair, 0) + weight / len(visited)
    return [Message(*pair, vectors[pair] / count[pair], count[pair]) for pair in count if count[pair] > 0]


def _ring_phases(name: str, topology: AbstractTopology, visits: list[tuple[set[int], float]]) -> list[Phase]:
    words = name.split("_")
    groups = node_groups(words[1], topology) if words[0] == "rings" else [list(range(topology.num_nodes))]
    size, both = len(groups[0]), "both" in words and len(groups[0]) > 2
    around: list[Message | Tree] = []
    chains: list[list[int]] = []
    for members in groups:
        part = sum(weight for visited, weight in visits if visited & set(members)) / size
        neighbours = topology.grid is not None and ("x" in words[1] if words[0] == "rings" else True)
        order = ring_order(topology.grid[1], members) if neighbours else members
        for way in ((order, order[::-1]) if both else (order,)) if part > 0 else ():
            chains.append(list(range(len(around), len(around) + size)))
            around += [Message(*step, part / (1 + both)) for step in zip(way, way[1:] + way[:1], strict=True)]
    phases = [Phase(around, size - 1, chains)]
    if len(groups) > 1 and "alone" not in words:
        phases.append(Phase(_between(groups, visits)))
    return phases


def _between(groups: list[list[int]], visits: list[tuple[set[int], float]]) -> list[Message | Tree]:
    """Of a token in V groups every group sends each other 1/V of every slice; slices of a pair go as one message."""
    vectors: dict[tuple[int, int], float] = {}
    for visited, weight in visits:
        met = [group for group, members in enumerate(groups) if visited & set(members)]
        for one in met:
            for other in met:
                if one != other and weight > 0:
                    for source, destination in zip(groups[one], groups[other], strict=True):
                        pair = source, destination
                        vectors[pair] = vectors.get(pair, 0) + weight / len(met) / len(groups[one])
    return [Message(*pair, amount) for pair, amount in vectors.items()]


def node_groups(words: str, topology: AbstractTopology) -> list[list[int]]:
    """`2x4`: rectangles of a mesh; `8`: successive nodes. Every group in ascending order."""
    cuts = [int(word) for word in words.split("x")]
    if len(cuts) == 1:
        size = topology.num_nodes // cuts[0]
        return [list(range(group * size, (group + 1) * size)) for group in range(cuts[0])]
    assert topology.grid is not None
    x, y = topology.grid
    wide, high = x // cuts[0], y // cuts[1]
    return [
        [(a * wide + i) * y + b * high + j for i in range(wide) for j in range(high)]
        for a in range(cuts[0])
        for b in range(cuts[1])
    ]


def ring_order(side: int, members: list[int]) -> list[int]:
    """A cycle of neighbours in a rectangle, down the first line and back through the rest as a snake.

    Rows are lines where they are even in number, else columns are; with neither, or one line, the snake alone.
    """
    rows, columns = sorted({node // side for node in members}), sorted({node % side for node in members})
    lines = [[row * side + column for column in columns] for row in rows]
    if len(rows) % 2 == 1 and len(columns) % 2 == 0:
        lines = [list(line) for line in zip(*lines, strict=True)]
    if len(lines) % 2 == 1 or len(lines) == 1 or len(lines[0]) == 1:
        return [node for index, line in enumerate(lines) for node in (line if index % 2 == 0 else line[::-1])]
    snake = [node for index, line in enumerate(lines) for node in (line[1:] if index % 2 == 0 else line[:0:-1])]
    return snake + [line[0] for line in lines[::-1]]


def priced(
    phases: list[Phase],
    topology: AbstractTopology,
    vector_bytes: float,
    chunk_bytes: float,
    cut_through: bool = False,
    backwards: bool = False,
) -> Stage:
    """Time of phases one after the other: of each the busiest link or port, and the longest path on top."""
    walks = _Walks(topology, backwards)
    total, link_time, port_time = 0.0, np.zeros(topology.num_links), np.zeros(2 * topology.num_nodes)
    for phase in phases:
        links, ports = np.zeros(topology.num_links), np.zeros(2 * topology.num_nodes)
        delays = [0.0] * len(phase.sends)
        for place, send in enumerate(phase.sends):
            used, sides, ends = walks.of(send)
            amount = vector_bytes * send.vectors * (send.count if isinstance(send, Message) else send.weight)
            for link in used:
                links[link] += amount
            for port in sides:
                ports[port] += amount
            whole = isinstance(send, Message) and cut_through
            for pair in ends:
                delay = walks.delay(*pair, send, send.vectors * vector_bytes, chunk_bytes, whole)
                delays[place] = max(delays[place], delay)
        links, ports = links / walks.link_rate, ports / walks.port_rate
        if phase.chains:
            total += max(_chain_end(phase, chain, walks, vector_bytes, links, ports, delays) for chain in phase.chains)
        else:
            total += phase.rounds * (max(links.max(initial=0), ports.max(initial=0)) + max(delays, default=0.0))
        link_time, port_time = link_time + phase.rounds * links, port_time + phase.rounds * ports
    limited = np.isfinite(walks.port_rate)
    return Stage(link_time, port_time[limited], total)


def _chain_end(
    phase: Phase,
    chain: list[int],
    walks: "_Walks",
    vector_bytes: float,
    links: np.ndarray,
    ports: np.ndarray,
    delays: list[float],
) -> float:
    """When the last step of a chain has arrived. Each begins when its way is free and the one before it has arrived."""
    own, shared = [], []  # how long a step keeps the slowest part of its way, and all steps the busiest part, s
    for place in chain:
        send = phase.sends[place]
        assert isinstance(send, Message)
        used, sides, _ = walks.of(send)
        rates = [*walks.link_rate[used], *walks.port_rate[sides]]
        own.append(vector_bytes * send.vectors / min(rates, default=np.inf))
        shared.append(max([*links[used], *ports[sides]], default=0.0))
    begin = [others - alone for others, alone in zip(shared, own, strict=True)]
    for _ in range(phase.rounds - 1):
        arrived = [begin[step] + own[step] + delays[place] for step, place in enumerate(chain)]
        free = [begin[step] + shared[step] for step in range(len(chain))]
        begin = [max(free[step], arrived[step - 1]) for step in range(len(chain))]
    return max(begin[step] + own[step] + delays[place] for step, place in enumerate(chain)) if phase.rounds else 0.0


class _Walks:
    """Paths of messages there, or back over the same links reversed."""

    def __init__(self, topology: AbstractTopology, backwards: bool):
        self.topology, self.backwards = topology, backwards
        self.nodes = topology.num_nodes
        self.reverse = [int(link) for link in np.asarray(topology.reverse_links)]
        self.paths = {False: topology.paths()}
        other = topology.crossed()
        if other is not None:
            self.paths[True] = other.paths()
        self.bandwidth = np.asarray(topology.link_bandwidth, float)
        self.latency = np.asarray(topology.link_latency, float)
        ports = [topology.injection_bandwidth, topology.ejection_bandwidth]
        self.port = np.concatenate([np.full(self.nodes, np.inf) if p is None else np.asarray(p, float) for p in ports])
        self.link_rate = self.bandwidth * float(topology.efficiency)
        self.port_rate = self.port * float(topology.efficiency)

    def path(self, source: int, destination: int, crossed: bool) -> list[int]:
        links = list(self.paths[crossed][source][destination])
        return [self.reverse[link] for link in reversed(links)] if self.backwards else links

    def of(self, send: Message | Tree) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Links and ports that carry what is sent, each as often as it does, and the pairs of nodes it runs between."""
        if isinstance(send, Message):
            if send.source == send.destination:
                return [], [], []
            ends = (send.source, send.destination)
            return self.path(*ends, False), self._ports([send.source], [send.destination]), [ends]
        others = sorted(send.sources - {send.home})
        links = {link for node in others for link in self.path(node, send.home, send.crossed)}
        return sorted(links), self._ports(others, [send.home] if others else []), [(node, send.home) for node in others]

    def _ports(self, starts: list[int], stops: list[int]) -> list[int]:
        if self.backwards:
            starts, stops = stops, starts
        return [*starts, *(self.nodes + node for node in stops)]

    def delay(
        self, source: int, destination: int, send: Message | Tree, size: float, chunk_bytes: float, cut_through: bool
    ) -> float:
        path = self.path(source, destination, isinstance(send, Tree) and send.crossed)
        seconds = float(self.topology.endpoint_latency) + sum(self.latency[link] for link in path)
        if cut_through:
            return seconds
        first, last = (destination, source) if self.backwards else (source, destination)
        chunk = min(chunk_bytes, size) if chunk_bytes > 0 else size
        rates = [self.port[first], *(self.bandwidth[link] for link in path), self.port[self.nodes + last]]
        return seconds + chunk * (sum(1 / rate for rate in rates) - 1 / min(rates))


def names_of(topology: AbstractTopology) -> Iterator[str]:
    """Every exchange that suits a network."""
    mesh = topology.grid is not None
    yield from (name for name in GATHERS if mesh or ("cross" not in name and "split" not in name))
    yield from LEAST_CONGESTED
    yield from PRICED
    yield from ("reduce_scatter", "ring", "ring_both_ways")
    cuts = [str(count) for count in range(2, topology.num_nodes + 1) if topology.num_nodes % count == 0]
    yield from (f"two_level_{cut}" for cut in cuts)
    if mesh:
        sides = [[n for n in range(1, side + 1) if side % n == 0] for side in topology.grid]
        cuts += [f"{a}x{b}" for a in sides[0] for b in sides[1] if a * b > 1]
    yield from (f"rings_{cut}{way}{alone}" for cut in cuts for way in ("", "_both_ways") for alone in ("", "_alone"))


def layer(
    machine: NumpyMachine, share: np.ndarray, tokens: Tokens, costs: Costs, mode: str, exchange: str
) -> dict[str, np.ndarray | float]:
    """All parts of the time of a layer on a mesh."""
    topology = machine.topology
    phases = combine_phases(exchange, topology, share, tokens, mode)
    node_time = node_times(machine, share, tokens, costs, mode)
    dispatch = priced(phases[::-1], topology, costs.dispatch_bytes, costs.chunk_bytes, backwards=True)
    combine = priced(phases, topology, costs.combine_bytes, costs.chunk_bytes)
    return {
        "compute": node_time.max(),
        "dispatch": dispatch.total,
        "combine": combine.total,
        "total": dispatch.total + node_time.max() + combine.total,
        "node_time": node_time,
        "dispatch_link_time": dispatch.link_time,
        "combine_link_time": combine.link_time,
    }
