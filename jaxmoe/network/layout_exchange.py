"""The exchange of a token layout, as any layer can have it: its tokens live in the layout's homes."""

from typing import Literal

import equinox as eqx

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.exchange import AbstractExchange
from jaxmoe.network.flows import Rounds
from jaxmoe.network.token_communication import AbstractTokenExchange, num_homes, token_exchange, visit_counts
from jaxmoe.network.visits import Visits
from jaxmoe.placement.token_layout import TokenLayout


class LayoutExchange(AbstractExchange):
    """Nodes fetch tokens from holders of their homes, and return results there (moentwine IV-A).

    The `source` of a token is the number of its home, as `token_homes` deals them.
    """

    exchange: AbstractTokenExchange
    homes: int = eqx.field(static=True)
    clusters: int = eqx.field(static=True, default=1)

    @property
    def returns_home(self) -> bool:
        return True

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Rounds:
        return self.exchange(visit_counts(visits.visited, visits.weight, visits.source, self.homes, self.clusters))


def layout_exchange(layout: TokenLayout, topology: AbstractTopology) -> LayoutExchange:
    """The exchange of a layout on its network."""
    clusters = layout.shape[0] if topology.grid is None else 1
    return LayoutExchange(token_exchange(layout, topology), num_homes(layout), clusters)
