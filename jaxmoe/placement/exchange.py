"""How hidden vectors get from where tokens are to where they are computed and back: exchanges by name.

A description only. `jaxmoe.network` says what an exchange costs; the event simulator carries it out on its own. A user
adds one to `EXCHANGES` (`jaxmoe.network.exchange.AbstractExchange`), and to `jaxmoe.des.exchanges.SIMULATED`.

Combine is what is described; dispatch is its mirror, over the same links reversed (hd_moe IV-C1).

- *Gather*: the partial results of a token meet at one node, its home. Every other node that it visits sends one vector
  there: as unicasts, or along a tree, the union of the paths to the home, whose routers add up what they pass on, so
  that a link carries a token's vector once. Dispatch is a multicast along the same tree.
- *Reduce-scatter*: each of the V nodes that a token visits ends with 1/V of its vector.
- *Rings*: the nodes of a group reduce-scatter round a ring the vectors of all tokens that visit the group, so each ends
  with an equal slice (hd_moe Eq. 4). One group is tensor parallelism. With several, a token that visits V groups has
  its slices added up between nodes of equal place in them, each group keeping 1/V: the complete hybrid.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxmoe.errors import InputError
from jaxmoe.registry import Registry, UnknownPartError

Home = Literal["lowest_host", "random_host", "fewest_hops", "least_loaded", "corner_host", "token_home"]
Route = Literal["unicast", "tree", "cross_tree", "split_tree"]
HOMES: tuple[str, ...] = get_args(Home)
ROUTES: tuple[str, ...] = get_args(Route)

LOAD_WEIGHT = 32  # of load relative to hops under `least_loaded`: hops for a home with the mean number of tokens


class ExchangeError(InputError):
    """An exchange that is not known or does not suit the machine, with the reason and the remedy."""


@dataclass(frozen=True)
class Gather:
    """Results of a token meet at its home.

    `lowest_host`: the lowest-numbered host of the expert that the token's draw names (hd_moe IV-B2; the paper says
    "one of the activated nodes"). `random_host`: a visited node, by the token's draw. `fewest_hops`: the visited node
    with the fewest hops to all others. `least_loaded`: the visited node of the least hops in all + LOAD_WEIGHT x tokens
    that it is already home to over their mean at the end; tokens come in their order. Among equals the lowest number.
    `corner_host`: the visited node nearest to a corner of the mesh, tokens taking the four corners in turn (on other
    networks all nodes in turn); trees towards corners keep links busy evenly in both directions.
    `token_home`: the node where the token lives, visited or not.

    A `tree` follows the machine's own paths to the home, `cross_tree` those of the other order of directions (meshes
    only), `split_tree` each with half of every vector. Routers hold a chunk whole before they copy or add it.
    """

    home: Home = "lowest_host"
    route: Route = "unicast"

    @property
    def name(self) -> str:
        return self.home if self.route == "unicast" else f"{self.home}_{self.route}"


@dataclass(frozen=True)
class ReduceScatter:
    """Every visited node ends with an equal part of the token's vector."""

    @property
    def name(self) -> str:
        return "reduce_scatter"


@dataclass(frozen=True)
class Rings:
    """Rings inside equal groups of nodes.

    `groups` is how many there are along each side of a mesh, or, as a single number, groups of successive nodes of
    any machine. With `both_ways` half of every part goes round the other way; a ring of two has but one way. Without
    `between` what groups would have to send each other is left out, as in hd_moe's published times.
    """

    groups: tuple[int, ...] = (1,)
    both_ways: bool = False
    between: bool = True

    @property
    def count(self) -> int:
        """Number of groups."""
        count = 1
        for along in self.groups:
            count *= along
        return count

    @property
    def name(self) -> str:
        if self.count == 1:
            return "ring_both_ways" if self.both_ways else "ring"
        parts = ["rings", "x".join(map(str, self.groups))]
        return "_".join(parts + ["both_ways"] * self.both_ways + ["alone"] * (not self.between))


@dataclass(frozen=True)
class Registered:
    """An exchange of a user's own, by the name that it is registered under or that fits the template of its family."""

    name: str


Exchange = Gather | ReduceScatter | Rings | Registered

_GATHERS = {Gather(home, route).name: Gather(home, route) for home in get_args(Home) for route in get_args(Route)}
GATHERS = tuple(_GATHERS)
RINGS = ("ring", "ring_both_ways")
_GROUPS = "rings_{2x4:[1-9][0-9]*(?:x[1-9][0-9]*)?}"
RINGS_IN_GROUPS = tuple(_GROUPS + ways + alone for ways in ("", "_both_ways") for alone in ("", "_alone"))

EXCHANGES: Registry[Any] = Registry(
    "exchange",
    "jaxmoe.exchanges",
    dict.fromkeys(GATHERS, "jaxmoe.network.exchange:GatherExchange")
    | {"reduce_scatter": "jaxmoe.network.exchange:ReduceScatterExchange"}
    | dict.fromkeys((*RINGS, *RINGS_IN_GROUPS), "jaxmoe.network.exchange:RingExchange"),
)


def exchange_of(name: str) -> Exchange:
    """The exchange of this name. Raises `ExchangeError` for any other, with the known ones."""
    if name in _GATHERS:
        return _GATHERS[name]
    if name == "reduce_scatter":
        return ReduceScatter()
    if name in RINGS:
        return Rings(both_ways=name != "ring")
    if rings := re.fullmatch(r"rings_([1-9]\d*(?:x[1-9]\d*)?)(_both_ways)?(_alone)?", name):
        groups = tuple(int(side) for side in rings[1].split("x"))
        return Rings(groups, both_ways=bool(rings[2]), between=not rings[3])
    try:
        EXCHANGES.entry(name)
    except UnknownPartError as error:
        raise ExchangeError(str(error)) from None
    return Registered(name)
