"""Strategies judged by the analytic model, exactly and on the same batches."""

from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.strategies import Rings, Strategy
from jaxmoe.latency import judge
from jaxmoe.network import AbstractExchange, block_rings
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class Score:
    """Seconds of every layer and batch [layer, batch], and how busy nodes and links are on average."""

    dispatch: np.ndarray
    compute: np.ndarray
    combine: np.ndarray
    total: np.ndarray
    node_time: np.ndarray  # [layer, node]
    dispatch_link_time: np.ndarray  # [layer, link]
    combine_link_time: np.ndarray

    @property
    def communication(self) -> np.ndarray:
        return self.dispatch + self.combine

    @property
    def p95_total(self) -> np.ndarray:
        """95th percentile over batches, s [layer]."""
        return np.quantile(self.total, 0.95, axis=1)

    @property
    def layer_total(self) -> np.ndarray:
        """Mean over batches, s [layer]."""
        return self.total.mean(axis=1)

    @property
    def link_time(self) -> np.ndarray:
        """What links carry in dispatch and combine together, s [layer, link]."""
        return self.dispatch_link_time + self.combine_link_time

    def first_batches(self, count: int) -> "Score":
        """Times of the first batches; node and link times stay means over all of them."""
        times = {name: getattr(self, name)[:, :count] for name in ("dispatch", "compute", "combine", "total")}
        return replace(self, **times)


def score(inputs: Inputs, strategy: Strategy, batches: Batch, gather: AbstractExchange | None = None) -> Score:
    """Judge a strategy; `gather` replaces the scenario's own rule where results gather."""
    rings = strategy.rings
    parts = {count: _score_all(inputs, strategy, batches, count, gather) for count in dict.fromkeys(rings)}
    return Score(
        **{
            name: np.stack([getattr(parts[count], name)[row] for row, count in enumerate(rings)])
            for name in (field.name for field in fields(Score))
        }
    )


def _score_all(
    inputs: Inputs, strategy: Strategy, batches: Batch, rings: Rings | None, gather: AbstractExchange | None
) -> Score:
    """Every layer scored with the same exchange: few shapes to compile for."""
    model = replace(inputs.model, mode=strategy.placement.mode)
    exchange = gather if rings is None else block_rings(inputs.shape, rings.count, rings.both_ways)
    seen = judge(model, jnp.asarray(strategy.placement.share), batches, exchange)
    return Score(**{field.name: np.asarray(getattr(seen, field.name), float) for field in fields(Score)})
