"""How hidden vectors get from where tokens are to where they are computed and back: exchanges by name.

A description only. `jaxmoe.network` says what an exchange costs; the event simulator carries it out on its own. A user
adds one to `EXCHANGES` (`jaxmoe.network.exchange.AbstractExchange`), and to `jaxmoe.des.exchanges.SIMULATED`.

Combine is what is described; dispatch is its mirror, over the same links reversed (hd_moe IV-C1).

- *Gather*: the partial results of a token meet at one node, its home. Every other node that it visits sends one vector
  there: as unicasts, or along a tree, the union of the paths to the home, whose routers add up what they pass on, so
  that a link carries a token's vector once. Dispatch is a multicast along the same tree.
- *Reduce-scatter*: each of the V nodes that a token visits ends with 1/V of its vector.
- *Least congested*: a gather whose tokens choose, in turn, where each half of their vector meets and along which tree,
  so that the links they use are those least busy so far.
- *PricedLinks*: a gather whose tokens draw these, each by itself, by a table of link prices that was made beforehand.
- *Rings*: the nodes of a group reduce-scatter round a ring the vectors of all tokens that visit the group, so each ends
  with an equal slice (hd_moe Eq. 4). One group is tensor parallelism. With several, a token that visits V groups has
  its slices added up between nodes of equal place in them, each group keeping 1/V: the complete hybrid.
- *Two levels*: a token's results meet in each group of nodes that it visits, and these at the node where it lives.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from jaxmoe.errors import InputError, PlanError
from jaxmoe.registry import Registry, UnknownPartError

Home = Literal["lowest_host", "random_host", "fewest_hops", "least_loaded", "corner_host", "token_home"]
Route = Literal["unicast", "tree", "cross_tree", "split_tree"]
HOMES: tuple[str, ...] = get_args(Home)
ROUTES: tuple[str, ...] = get_args(Route)

Number = Any  # an int, or an array where JAX traces it

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

    `unicast`: a vector from every visited node. `tree`: along the paths of the machine; routers copy and add up.
    `cross_tree`: along a tree of the other order of directions (meshes only). `split_tree`: along both trees, half of
    every vector each. Routers hold a chunk whole before they copy or add it.

    Tokens move to a home other than `token_home` for free: where they lived before the gate chose is not paid for.
    """

    home: Home = "lowest_host"
    route: Route = "unicast"

    @property
    def name(self) -> str:
        return self.home if self.route == "unicast" else f"{self.home}_{self.route}"

    @property
    def returns_home(self) -> bool:
        """Whether results end where tokens live."""
        return self.home == "token_home"

    @property
    def knows(self) -> Literal["nothing", "batch"]:
        """Of what other tokens it has to know at run time: none, or those of this batch."""
        return "batch" if self.home == "least_loaded" else "nothing"

    def choices_in_turn(self, tokens: Number) -> Number:
        """How many choices so many tokens take one after another, each knowing those before."""
        return tokens if self.home == "least_loaded" else 0


Meeting = Literal["any", "visited", "token_home"]

LEVELS = 16  # a link doubles its price at every 1/16 of the load of the busiest one
ROUNDING = 2**-10  # of a level: quotients are not rounded alike everywhere, and whole ones must not fall below


@dataclass(frozen=True)
class LeastCongested:
    """Tokens choose, in turn, where their results meet, by prices of the links on the way.

    Every link has a price: 2 to the power of the whole part of LEVELS x its load over that of the busiest link (plus
    ROUNDING). A load is what tokens have chosen so far, and half a message more, over the rate of the link. A token
    chooses the node and the paths whose links cost least; among equals the paths along the machine's own order of
    directions, then the node of the lowest number. Its results may meet at `any` node, at one that it has `visited`,
    or at its `token_home`.

    A `tree` is chosen for each half of the vector by itself, the second after the first is known, on meshes in either
    order of directions. A `unicast` takes the machine's own paths with the whole vector, and pays for every path. So
    many tokens choose `at_once`, without knowing of each other: a batch takes so many fewer choices one after another.
    Unless results meet at the `token_home`, tokens move to where they meet for free.
    """

    meeting: Meeting = "any"
    route: Literal["tree", "unicast"] = "tree"
    at_once: int = 1

    @property
    def name(self) -> str:
        parts = ["least_congested"]
        parts += [self.meeting] * (self.meeting != "any") + [self.route] * (self.route != "tree")
        return "_".join(parts + [f"by_{self.at_once}"] * (self.at_once != 1))

    @property
    def returns_home(self) -> bool:
        """Whether results end where tokens live."""
        return self.meeting == "token_home"

    @property
    def knows(self) -> Literal["nothing", "batch"]:
        """Of what other tokens it has to know at run time: those of this batch."""
        return "batch"

    def choices_in_turn(self, tokens: Number) -> Number:
        """How many choices so many tokens take one after another, each knowing those before."""
        return -(-tokens // self.at_once)


HALVES = 2  # of a vector under `PricedLinks`, each with a tree of its own
SOFTNESS = 0.5  # of `PricedLinks` without a table, of which every link costs 1


@dataclass(frozen=True)
class PricedLinks:
    """Tokens draw where halves of their results meet, by a table of link prices, and know nothing of each other.

    The chance of a node and a route, the machine's own or the other order of directions on meshes, is in proportion to
    exp(-cost / `softness`), where the cost is the sum of the prices of the tree's links. Results may meet at `any`
    node, at one that the token has `visited`, or at its `token_home`. Options stand in the order of routes, then of
    nodes. Half 0 takes the one in whose part of the running sum of chances the token's draw falls, and half 1 that of
    the draw + 1/2, less 1 from 1 on: each half is drawn by the chances, and the two keep apart. Without a `price` for
    every link, each costs 1.
    """

    meeting: Meeting = "any"
    price: tuple[float, ...] = ()
    softness: float = SOFTNESS

    def __post_init__(self) -> None:
        for price in self.price:
            if not 0 <= price < math.inf:
                raise ExchangeError(f"exchange {self.name} has a price of {price:g}, expected finite ones of 0 or more")
        if not 0 < self.softness < math.inf:
            raise ExchangeError(f"exchange {self.name} has a softness of {self.softness:g}, expected one above 0")

    @property
    def name(self) -> str:
        return "priced" if self.meeting == "any" else f"priced_{self.meeting}"


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


Exchange = Gather | LeastCongested | PricedLinks | ReduceScatter | Rings | Registered

_GATHERS = {Gather(home, route).name: Gather(home, route) for home in get_args(Home) for route in get_args(Route)}
GATHERS = tuple(_GATHERS)
LEAST_CONGESTED = tuple(
    LeastCongested(meeting, route).name + several
    for several in ("", "_by_{8:[1-9][0-9]*}")
    for meeting in get_args(Meeting)
    for route in ("tree", "unicast")
)
_PRICED = {PricedLinks(meeting).name: PricedLinks(meeting) for meeting in get_args(Meeting)}
PRICED = tuple(_PRICED)
RINGS = ("ring", "ring_both_ways")
_GROUPS = "rings_{2x4:[1-9][0-9]*(?:x[1-9][0-9]*)?}"
TWO_LEVELS = "two_level_{4:[1-9][0-9]*}"  # of so many groups of successive nodes
RINGS_IN_GROUPS = tuple(_GROUPS + ways + alone for ways in ("", "_both_ways") for alone in ("", "_alone"))

EXCHANGES: Registry[Any] = Registry(
    "exchange",
    "jaxmoe.exchanges",
    dict.fromkeys(GATHERS, "jaxmoe.network.exchange:GatherExchange")
    | dict.fromkeys(LEAST_CONGESTED, "jaxmoe.network.congested:LeastCongestedExchange")
    | dict.fromkeys(PRICED, "jaxmoe.network.priced:PricedExchange")
    | {"reduce_scatter": "jaxmoe.network.exchange:ReduceScatterExchange"}
    | dict.fromkeys((*RINGS, *RINGS_IN_GROUPS), "jaxmoe.network.exchange:RingExchange")
    | {TWO_LEVELS: "jaxmoe.network.two_level:TwoLevelExchange"},
)


def exchange_of(name: str) -> Exchange:
    """The exchange of this name. Raises `ExchangeError` for any other, with the known ones."""
    if name in _GATHERS:
        return _GATHERS[name]
    if name in _PRICED:
        return _PRICED[name]
    if name == "reduce_scatter":
        return ReduceScatter()
    if chosen := re.fullmatch(r"least_congested(?:_(visited|token_home))?(?:_(unicast))?(?:_by_([1-9]\d*))?", name):
        return LeastCongested(chosen[1] or "any", chosen[2] or "tree", int(chosen[3] or 1))  # type: ignore[arg-type]
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


# Prices of links of a plan, layer by layer.


@dataclass(frozen=True, eq=False)
class PriceTable:
    """A price of 0 or more for every link of a machine, and how softly tokens choose by them, float32.

    Each layer has its own; layers under other exchanges make no use of theirs.
    """

    price: Float[np.ndarray, "layer link"]
    softness: Float[np.ndarray, " layer"]

    def __post_init__(self) -> None:
        try:
            for row in range(len(self.price)):
                self.described("priced", row)
        except ExchangeError as error:
            raise PlanError(str(error)) from None

    def described(self, name: str, row: int) -> Exchange | str:
        """The exchange of this name with the prices of a layer, if it goes by prices; else the name."""
        exchange = exchange_of(name)
        if not isinstance(exchange, PricedLinks):
            return name
        return PricedLinks(exchange.meeting, tuple(self.price[row].tolist()), float(self.softness[row]))

    def rows(self, rows: Sequence[int]) -> "PriceTable":
        """The prices of these layers alone."""
        return PriceTable(self.price[list(rows)], self.softness[list(rows)])

    def arrays(self) -> dict[str, np.ndarray]:
        """The table as arrays of a plan file, by name."""
        return {
            "exchange_price": self.price.astype(np.float32),
            "exchange_softness": self.softness.astype(np.float32),
        }


def prices_of_arrays(arrays: dict[str, np.ndarray]) -> PriceTable | None:
    """The table in the arrays of a plan file, if there is one. Raises `PlanError` for a bad one."""
    names = ("exchange_price", "exchange_softness")
    there = [name for name in names if name in arrays]
    if not there:
        return None
    if len(there) == 1:
        (missing,) = set(names) - set(there)
        raise PlanError(f"has {there[0]} and no {missing}; write the plan again")
    price, softness = (arrays[name] for name in names)
    if price.ndim != 2 or price.dtype.kind != "f":
        raise PlanError(f"exchange_price is {price.dtype} of shape {price.shape}, expected floats [layer, link]")
    if softness.shape != price.shape[:1] or softness.dtype.kind != "f":
        raise PlanError(
            f"exchange_softness is {softness.dtype} of shape {softness.shape}, expected a float for each of the "
            f"{len(price)} layers of exchange_price"
        )
    return PriceTable(price, softness)
