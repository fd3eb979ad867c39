"""A package of a user's own, one part of every kind; `entry_points.txt` beside it names them."""

import json
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import jaxmoe as jm
from jaxmoe.des.exchanges import phases
from jaxmoe.experiment.metrics import Metric
from jaxmoe.network import Flows
from jaxmoe.placement.engine_formats import EngineFormat, FilePlacement
from jaxmoe.settings import setting


class Dragonfly(jm.Topology):
    """Groups of as many nodes as there are groups: the nodes of a group are all joined, and so are all groups."""

    groups: int = setting(help="the number of groups, each of as many nodes", at_least=2, example=4, static=True)

    def _links(self):
        size = self.groups
        inside = [(g * size + a, g * size + b) for g in range(size) for a, b in combinations(range(size), 2)]
        return inside + [(g * size + h, h * size + g) for g, h in combinations(range(size), 2)]

    @property
    def link_ends(self):
        return np.array([*self._links(), *((b, a) for a, b in self._links())])

    def paths(self):
        link = {tuple(ends): number for number, ends in enumerate(self.link_ends.tolist())}
        nodes = range(self.groups**2)
        return [[tuple(link[hop] for hop in self._hops(s, d)) for d in nodes] for s in nodes]

    def _hops(self, s, d):
        size = self.groups
        g, h = s // size, d // size
        stops = [s, d] if g == h else [s, g * size + h, h * size + g, d]
        return [hop for hop in pairwise(stops) if hop[0] != hop[1]]


class RoundRobin(jm.Exchange):
    """Results of token i meet at node i, and after the last node at the first again."""

    unicast = True
    note = "tokens' results meet at nodes in turn"

    def __call__(self, topology, visits):
        home = jnp.arange(visits.visited.shape[0]) % topology.num_nodes
        return ((Flows(visits.visited, home, jnp.ones(()), visits.weight),),)


def in_turn(exchange, fabric, visited, home, size, mirrored):
    """One message of every visited node but the one where a token's results meet."""
    token, node = np.nonzero(visited)
    meets = token % fabric.num_nodes
    some = meets != node
    return phases(fabric, [(node[some], meets[some], np.full(some.sum(), size))], mirrored)


def from_the_last(counts, topology, settings):
    """Expert e on the e-th node from the last one on."""
    nodes = topology.num_nodes
    return np.eye(nodes)[-1 - np.arange(counts.shape[1]) % nodes][None].repeat(len(counts), axis=0)


class Hottest(jm.Method):
    """Before every step, the expert that was hottest so far is copied to all nodes."""

    whole_experts = True

    share: Float[Array, "layer expert node"]

    def init(self, machine):
        return jnp.zeros(self.share.shape[:2])

    def step(self, machine, seen, tokens, last):
        sent = jax.nn.one_hot(seen.argmax(axis=1), seen.shape[1])[..., None] * jnp.ones(machine.num_nodes)
        counts = jax.vmap(lambda batch: batch.choices(seen.shape[1]).sum(axis=0))(tokens)
        return seen + counts, jm.Decisions(self.share, movements=(jm.Movement(sent, most=1),))


class Startup(jm.KernelModel):
    """Every product starts up anew, whatever its size."""

    within_rate = True

    startup_us: Float[Array, ""] = setting(1.0, help="the time to start a product", unit="us", at_least=0, example=2)

    def seconds(self, rows, part, present, flops, columns, gemms):
        return rows * part / flops + present * gemms * self.startup_us * 1e-6

    def witness(self, flops, columns, gemms):
        return lambda node, tokens, part: tokens * part / flops[node] + gemms * float(self.startup_us) * 1e-6


spread = Metric("spread", lambda seen: seen.times.total.std() / seen.times.total.mean())

mine = EngineFormat(
    ".json",
    lambda content: isinstance(content, dict) and "mine" in content,
    lambda content, hints, ranks: FilePlacement(np.array(content["mine"], np.int64)),
    lambda plan: json.dumps({"mine": plan.slots.tolist()}),
)
