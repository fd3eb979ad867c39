"""The exchange of two levels: messages by hand, and the model against the simulator on machines of clusters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats

from jaxmoe.des import fabric_of, replay_plan
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.engine import evaluate
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.hardware import Die, Machine, clusters
from jaxmoe.network import build_exchange
from jaxmoe.placement.exchange import ExchangeError, exchange_of

TWO = clusters(2, 4, 2.0, 0.1, 1.0, 0.3)
SIZE = 12.0


def sent(visited, home, mirrored=False):
    parts = stage_transfers(
        exchange_of("two_level_2"), fabric_of(TWO, 4.0), np.array(visited), np.array(home), SIZE, mirrored
    )
    assert all((part.size == SIZE).all() for part in parts)
    return [list(zip(part.sender.tolist(), part.receiver.tolist(), strict=True)) for part in parts]


def test_one_copy_goes_to_a_cluster_and_on_inside():
    # Nodes 1 and 2 are in the home's cluster; 5 and 6 in the other one, where they meet at 4, of the place of 0.
    visited = [[False, True, True, False, False, True, True, False]]
    assert sent(visited, [0]) == [[(1, 0), (2, 0), (5, 4), (6, 4)], [(4, 0)]]
    assert sent(visited, [0], mirrored=True) == [[(0, 4)], [(0, 1), (0, 2), (4, 5), (4, 6)]]
    # A home that is visited sends itself nothing, and what is at the meeting node already stays.
    assert sent([[True, False, False, False, True, False, False, False]], [0]) == [[(4, 0)]]


def test_groups_have_to_be_equal():
    with pytest.raises(ExchangeError, match=r"two_level_3 makes 3 equal groups of 8 nodes, .* use 1, 2, 4, 8 groups"):
        build_exchange("two_level_3", TWO)


@pytest.mark.parametrize("tokens", [100, 400])
def test_the_model_agrees_with_the_simulator(tokens):
    rng, experts = np.random.default_rng(tokens), 16
    topology = clusters(4, 4, 4e9, 1e-9, 2e9, 1e-9)
    share = np.eye(experts)[None]
    drawn = [cases.random_tokens(rng, tokens, experts, 4) for _ in range(3)]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *map(cases.batch, drawn))
    batches = replace(batches, weight=jnp.ones_like(batches.weight))
    found = {}
    for name in ("two_level_4", "token_home"):
        model = cases.model_on(Machine(topology, Die(floats(np.full(16, 1e15)))), "sharded", name)
        time = evaluate(model, jnp.asarray(share, jnp.float32), batches)
        layer = describe_model(model, fabric_of(topology, cases.COSTS.chunk_bytes), "sharded", name)
        (seen,) = replay_plan(layer, share, batches)
        for stage in ("dispatch", "combine"):
            links = np.mean([each.link_busy[stage] for each in seen], axis=0)
            np.testing.assert_allclose(time.busy[stage]["link"][0], links, rtol=1e-4, atol=1e-12)
        # Results that come in at a node at once wait there in the simulator, under any gather: combine is later.
        dispatched = np.array([each.stages["dispatch"] for each in seen])
        np.testing.assert_allclose(time.stages["dispatch"][0], dispatched, rtol=0.08)
        found[name] = np.array([float(time.total.mean()), np.mean([each.total_s for each in seen])])
    assert (found["two_level_4"] < found["token_home"]).all()
