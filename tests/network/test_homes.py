"""Where tokens meet: every rule against loops, and by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases
from oracles import exchange as oracle
from oracles.arrays import floats
from oracles.layer import Tokens
from oracles.topologies import NETWORKS, mesh

from jaxmoe.network import Visits, replicated_visits, sharded_visits
from jaxmoe.network.visits import _hops, homes
from jaxmoe.relax import HardSupport, as_weights

VISITS = {"sharded": sharded_visits, "replicated": replicated_visits}
EXPERTS, TOKENS, TOP_K = 5, 24, 3


def home_weights(rule, topology, visits) -> jax.Array:
    """1 at the home of every token."""
    return as_weights(homes(rule, topology, visits), topology.num_nodes, jnp.float32)


@eqx.filter_jit
def measured(topology, share, batch, mode) -> dict[str, jax.Array]:
    visits = VISITS[mode](share, batch, HardSupport())
    return {rule: home_weights(rule, topology, visits) for rule in oracle.HOMES}


def check(topology, share: np.ndarray, tokens: Tokens, mode: str) -> None:
    seen = measured(topology, floats(share), cases.batch(tokens), mode)
    for rule, found in seen.items():
        expected = oracle.token_homes(rule, topology, share, tokens, mode)
        for token, node in enumerate(expected):
            if node is not None:
                assert np.flatnonzero(found[token]).tolist() == [node], (rule, token)


@pytest.mark.parametrize("mode", VISITS)
@pytest.mark.parametrize("name", ["mesh", "torus", "clusters", "detours"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_homes_equal_the_loops(name, mode, seed):
    rng = np.random.default_rng(seed)
    topology = NETWORKS[name]
    share = cases.random_share(rng, EXPERTS, topology.num_nodes)
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True)
    tokens.weight = rng.integers(0, 3, TOKENS).astype(float)
    tokens.source = rng.integers(topology.num_nodes, size=TOKENS) if rng.random() < 0.5 else None
    check(topology, share, tokens, mode)


def visits_of(visited, draw=0.0, weight=1.0) -> Visits:
    """Tokens that visit these nodes."""
    tokens, nodes = np.shape(visited)
    # Made by NumPy: JAX would compile every shape.
    nothing, none = (floats(np.zeros(shape)) for shape in ((1, nodes), nodes))
    draws, weights = (jnp.asarray(np.broadcast_to(number, tokens), jnp.float32) for number in (draw, weight))
    first = jnp.asarray(np.zeros(tokens, np.int32))
    return Visits(
        jnp.asarray(visited, jnp.float32), first, nothing, none, nothing, nothing, none, weights, draws, first
    )


@eqx.filter_jit
def found(rule, topology, visits):
    return home_weights(rule, topology, visits).argmax(axis=1)


sharded = jax.jit(lambda share, batch: sharded_visits(share, batch, HardSupport()))


def test_a_random_host_is_that_of_the_draw_times_their_number():
    draws = [0.0, 0.32, 0.34, 0.66, 0.67, 0.999]
    visits = visits_of([[0, 1, 0, 1, 1, 0]] * 6, draws)
    assert found("random_host", mesh((2, 3)), visits).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("hosts", range(1, 9))
def test_draws_on_the_border_between_hosts_go_to_the_higher_one(hosts):
    visited = np.arange(8) < hosts
    visits = visits_of(np.tile(visited, (hosts, 1)), np.arange(hosts, dtype=np.float32) / np.float32(hosts))
    floors = np.floor(np.asarray(visits.draw) * np.float32(hosts)).astype(int)
    assert found("random_host", mesh((2, 4)), visits).tolist() == floors.tolist()


def test_of_equally_near_nodes_the_lowest_is_home():
    # On a line of six the tokens are at 1 and 4, at 0, 2 and 5, and at 3 and 2.
    visited = np.zeros((3, 6))
    visited[0, [1, 4]] = visited[1, [0, 2, 5]] = visited[2, [2, 3]] = 1
    assert found("fewest_hops", mesh((1, 6)), visits_of(visited)).tolist() == [1, 2, 2]


def test_tokens_spread_over_their_nodes_though_these_are_far():
    # Each of four tokens is at both ends of a line of four: 3 hops either way, so load alone decides.
    visits = visits_of([[1, 0, 0, 1]] * 4)
    assert found("least_loaded", mesh((1, 4)), visits).tolist() == [0, 3, 0, 3]
    # A token of weight 3 counts as three: after it, three of weight 1 go to the other end.
    visits = visits_of([[1, 0, 0, 1]] * 5, weight=[3, 1, 1, 1, 1])
    assert found("least_loaded", mesh((1, 4)), visits).tolist() == [0, 3, 3, 3, 0]


def test_few_hops_count_where_many_tokens_are_to_come():
    # 64 tokens on 4 nodes: one held costs 32 x 4 / 64 = 2 hops. At 0, 1 and 3 the middle has 3 hops, node 0 has 4.
    visits = visits_of([[1, 1, 0, 1]] * 64)
    assert found("least_loaded", mesh((1, 4)), visits).tolist()[:4] == [1, 0, 1, 3]


def test_a_home_is_a_node_that_is_visited_however_many_tokens_it_has():
    visits = visits_of([[1, 0, 0, 0]] * 200)
    assert set(found("least_loaded", mesh((2, 2)), visits).tolist()) == {0}


def test_tokens_live_evenly_on_successive_nodes_unless_told():
    experts = np.zeros((8, 1), int)
    tokens = Tokens(experts, np.zeros(8), np.zeros((8, 1)), np.ones(8))
    share = floats(np.eye(3))
    visits = sharded(share, cases.batch(tokens))
    assert found("token_home", mesh((1, 3)), visits).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    tokens.source = np.array([2, 0, 1, 2, 2, 0, 0, 1])
    visits = sharded(share, cases.batch(tokens))
    assert found("token_home", mesh((1, 3)), visits).tolist() == tokens.source.tolist()


def test_a_draw_names_a_choice_that_the_token_has():
    # Of two choices, in the first and the last place, the draw below a half names the first.
    tokens = Tokens(np.array([[4, -1, 2]] * 3), np.array([0.1, 0.49, 0.5]), np.zeros((3, 3)), np.ones(3))
    batch = cases.batch(tokens)
    assert batch.gather_expert.tolist() == [4, 4, 2]
    visits = sharded(floats(np.eye(5, 6)), batch)
    assert found("lowest_host", mesh((2, 3)), visits).tolist() == [4, 4, 2]


def test_the_longest_way_over_a_mesh_is_found_before_xla_compiles():
    """XLA takes a minute over the maximum of a constant of 4096 nodes squared."""
    hops, longest = _hops(mesh((3, 5)), visits_of([[1] * 15]))
    assert isinstance(longest, np.integer)
    assert int(longest) == int(hops.max()) == 2 + 4
