"""A table of link prices for the exchanges `priced`, fitted to a plan by descent over many batches.

The price of a link rises with what it adds to the smooth maximum of busy times. Times are those of tokens that draw:
batches and draws vary, so it is the mean of their maxima that has to come down, not the maximum of their means. A draw
has no derivative; that of the mean over all draws takes its place.
"""

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxmoe.engine.layer import Layer
from jaxmoe.network import StageTime, Visits, replicated_visits, sharded_visits
from jaxmoe.network.priced import PricedExchange
from jaxmoe.placement.exchange import Meeting, PriceTable
from jaxmoe.relax import HardSupport, SmoothMax, straight_through
from jaxmoe.traces.batches import Batch


class PriceFit(eqx.Module):
    """How long and how softly prices are fitted."""

    steps: int = eqx.field(static=True, default=600)
    batches_per_step: int = eqx.field(static=True, default=16)
    learning_rate: float = 0.05  # of the logarithms of prices and softness
    temperature: float = 0.1  # of the smooth maximum, relative
    softness: float = 1.0  # at first, when prices are 1


class FittedPrices(NamedTuple):
    """Prices of links and softness of every layer, and the objective at every step, s of combine."""

    price: Float[Array, "layer link"]
    softness: Float[Array, " layer"]
    history: Float[Array, "layer step"]

    def table(self) -> PriceTable:
        """The table of a plan."""
        return PriceTable(np.asarray(self.price), np.asarray(self.softness))


class _Logs(NamedTuple):
    """What descends: logarithms, so that all stay above 0."""

    price: Float[Array, " link"]
    softness: Float[Array, ""]


@eqx.filter_jit
def fit_link_prices(
    model: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    meeting: Meeting = "any",
    settings: PriceFit | None = None,
    seed: int = 0,
) -> FittedPrices:
    """Fit prices to a plan on drawn batches, leaves [layer, batch, token, ...]; judge them on others.

    Every step has some of the batches, whose tokens draw anew. The table is the mean of the second half of the steps,
    in logarithms. The same seed gives the same prices.
    """
    settings = PriceFit() if settings is None else settings
    descent, half = optax.adam(settings.learning_rate), settings.steps // 2

    def layer(given: tuple[Array, Batch, Array]) -> FittedPrices:
        share, batches, keys = given
        visits = jax.vmap(lambda batch: _visits(model, share, batch))(batches)

        def step(state: tuple[_Logs, optax.OptState], key: Array) -> tuple[tuple[_Logs, optax.OptState], tuple]:
            logs, moments = state
            some = _some(visits, settings.batches_per_step, key)
            value, slope = jax.value_and_grad(_objective)(logs, model, some, meeting, settings.temperature)
            change, moments = descent.update(slope, moments)
            logs = optax.apply_updates(logs, change)
            return (logs, moments), (logs, value)

        start = _Logs(jnp.zeros(model.machine.topology.num_links), jnp.log(settings.softness))
        _, (seen, history) = jax.lax.scan(step, (start, descent.init(start)), keys)
        mean = jax.tree.map(lambda values: jnp.exp(values[half:].mean(axis=0)), seen)
        return FittedPrices(mean.price, mean.softness, jnp.exp(history))

    keys = jax.random.split(jax.random.key(seed), (len(share), settings.steps))
    return jax.lax.map(layer, (share, batches, keys))


def _visits(model: Layer, share: Float[Array, "expert node"], batch: Batch) -> Visits:
    visits = sharded_visits if model.mode == "sharded" else replicated_visits
    return visits(share, batch, HardSupport())


def _some(visits: Visits, count: int, key: Array) -> Visits:
    """So many of the batches, all if there are fewer, with draws of their own."""
    batches = len(visits.weight)
    picking, drawing = jax.random.split(key)
    picked = jax.random.choice(picking, batches, (min(count, batches),), replace=False)
    visits = jax.tree.map(lambda leaf: leaf[picked], visits)
    return eqx.tree_at(lambda some: some.draw, visits, jax.random.uniform(drawing, visits.draw.shape))


def _objective(
    logs: _Logs, model: Layer, visits: Visits, meeting: Meeting, temperature: float | Array
) -> Float[Array, ""]:
    """Logarithm of the smooth maximum of busy times in combine, mean over batches. Dispatch is its mirror."""
    exchange = PricedExchange(jnp.exp(logs.price), jnp.exp(logs.softness), meeting)

    def busiest(visits: Visits) -> Float[Array, ""]:
        drawn, mean = (_busy(model, exchange, replace(visits, relaxed=relaxed)) for relaxed in (False, True))
        return SmoothMax(jnp.asarray(temperature))(straight_through(drawn, mean))

    return jnp.log(jax.vmap(busiest)(visits).mean())


def _busy(model: Layer, exchange: PricedExchange, visits: Visits) -> Float[Array, " resource"]:
    """Seconds that links and ports, or pairs of nodes, are busy in combine."""
    (flows,) = exchange(model.machine.topology, visits)
    stages = [model.time_model.of_flows(model.machine.topology, each, model.costs.combine_bytes) for each in flows]
    stage = reduce(StageTime.beside, stages)
    return jnp.concatenate([stage.link_time, stage.port_time, stage.pair_time])
