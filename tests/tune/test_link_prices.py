"""Fitted prices on a machine with one slow link: they lead around it, on unseen batches too, and repeat by seed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import full
from oracles.topologies import mesh
from small_problem import EXPERTS, LAYERS, small_trace

from jaxmoe.engine import evaluate
from jaxmoe.hardware import Die, Machine
from jaxmoe.network import build_exchange
from jaxmoe.placement.exchange import PricedLinks
from jaxmoe.traces import sample_batches
from jaxmoe.tune.link_prices import PriceFit, fit_link_prices

SLOW, NODES = 5, 6
SETTINGS = PriceFit(steps=60, batches_per_step=4, learning_rate=0.1)


@pytest.fixture(scope="module")
def problem():
    """A layer model on a 2x3 mesh with a link of a quarter of the rate of all others, shares, and tuning batches."""
    topology = mesh((2, 3))
    topology = dataclasses.replace(topology, link_bandwidth=topology.link_bandwidth.at[SLOW].multiply(0.25))
    model = cases.model_on(Machine(topology, Die(full(NODES, 1e15))), "sharded", "priced")
    rng = np.random.default_rng(0)
    share = jnp.asarray(np.stack([cases.random_share(rng, EXPERTS, NODES) for _ in range(LAYERS)]), jnp.float32)
    return model, share, sample_batches(small_trace(), 48, 8, seed=1)


@pytest.fixture(scope="module")
def fitted(problem):
    return fit_link_prices(*problem, settings=SETTINGS)


def test_prices_lead_around_a_slow_link_on_unseen_batches(problem, fitted):
    model, share, _ = problem
    assert fitted.price.shape == (LAYERS, model.machine.topology.num_links)
    assert (fitted.price.argmax(axis=1) == SLOW).all()
    assert (fitted.history[:, -10:].mean(axis=1) < fitted.history[:, :10].mean(axis=1)).all()
    unseen = sample_batches(small_trace(), 48, 16, seed=2)
    table = fitted.table()
    for row in range(LAYERS):
        batches = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], unseen)

        def seconds(described, row=row, batches=batches) -> float:
            exchange = build_exchange(described, model.machine.topology)
            return float(evaluate(model, share[row : row + 1], batches, exchange).total.mean())

        fitted_to = seconds(table.described("priced", row))
        assert fitted_to < 0.99 * min(seconds(PricedLinks(softness=softness)) for softness in (0.5, 2.0, 4.0))


def test_fitted_prices_do_not_make_tokens_herd(problem, fitted):
    """Were all tokens to take the cheapest way by the same prices, their busiest links would carry more."""
    model, share, _ = problem
    unseen, table = sample_batches(small_trace(), 48, 16, seed=2), fitted.table()

    def seconds(softness) -> float:
        described = PricedLinks("any", tuple(table.price[0].tolist()), float(softness))
        batches = jax.tree.map(lambda leaf: leaf[:1], unseen)
        exchange = build_exchange(described, model.machine.topology)
        return float(evaluate(model, share[:1], batches, exchange).communication.mean())

    assert seconds(table.softness[0]) < 0.9 * seconds(1e-3)


def test_the_same_seed_gives_the_same_prices(problem, fitted):
    again, other = (fit_link_prices(*problem, settings=SETTINGS, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.price, fitted.price)
    assert (other.price != fitted.price).any()
