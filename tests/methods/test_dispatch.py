"""Where tokens of broadcast experts go: an example like hd_moe Fig. 7 by hand, plain loops, and what must hold."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases
from oracles import dynamic as oracle
from oracles.arrays import floats, full
from oracles.layer import Tokens
from small_dynamic import EXPERTS, NODES, TOKENS, TOP_K, Case, random_case

from jaxmoe.methods import serve
from jaxmoe.network import decided_visits, sharded_visits
from jaxmoe.relax import HardSupport, as_weights

run = eqx.filter_jit(serve)
visits_of = eqx.filter_jit(lambda share, batch, served: decided_visits(share, batch, served, HardSupport()))
static_visits = eqx.filter_jit(lambda share, batch: sharded_visits(share, batch, HardSupport()))
seeds = st.integers(0, 10**6)


def make_tokens(experts, weight=None) -> Tokens:
    experts = np.array(experts)
    weights = np.ones(len(experts)) if weight is None else np.array(weight, float)
    return Tokens(experts, np.zeros(len(experts)), np.zeros(experts.shape), weights)


def served(experts, broadcast, seconds_each=(1.0, 1.0, 1.0, 1.0), weight=None, share=None) -> list[list[int]]:
    """Of experts that live on the node of their number unless a share is given."""
    share = floats(np.eye(4)) if share is None else jnp.asarray(share)
    batch = cases.batch(make_tokens(experts, weight))
    marked = jnp.zeros(len(share), bool).at[jnp.asarray(broadcast, int)].set(True)
    return run(share, batch, marked, jnp.asarray(seconds_each)).tolist()


# Every token wants expert 0, so node 0 has five choices, node 1 two and the others one each.
CONGESTED = [[0, 1], [0, 2], [0, 1], [0, 3], [0, -1]]


def test_a_congested_node_is_relieved_by_hand():
    # Nodes 1, 2 and 3 have 2, 1 and 1 to begin with. Token 0 finds less to do at 0 than at 1, token 1 as much at 0 as
    # at 2, and token 2 as much at 0 as at 1: all stay at 0, which then has 3. Token 3 finds 1 at node 3. Token 4 is
    # nowhere else.
    assert served(CONGESTED, [0]) == [[0, -1], [0, -1], [0, -1], [3, -1], [0, -1]]
    batch = cases.batch(make_tokens(CONGESTED))
    decided = visits_of(floats(np.eye(4)), batch, jnp.array(served(CONGESTED, [0])))
    assert decided.work.tolist() == [4, 2, 1, 2]
    assert decided.visited.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    # The draw of all names expert 0: home is the node that serves it.
    assert decided.lowest_host().argmax(axis=1).tolist() == [0, 0, 0, 3, 0]
    assert static_visits(floats(np.eye(4)), batch).work.tolist() == [5, 2, 1, 1]


def test_seconds_count_and_not_tokens():
    # Node 0 takes twice as long: token 1 finds 2 s there and 1 s at node 2, token 2 finds 2 s at both of its nodes.
    assert served(CONGESTED, [0], (2.0, 1.0, 1.0, 1.0)) == [[0, -1], [2, -1], [0, -1], [3, -1], [0, -1]]


def test_a_token_all_of_whose_experts_are_everywhere_stays_among_their_hosts():
    # Nodes 2 and 3 are idle, but the token is at 0 and 1 only; its second choice finds the first served at 0.
    assert served([[0, 1], [2, 3]], [0, 1]) == [[0, 1], [-1, -1]]
    # Shares: expert 0 lives on 1 and 3.
    share = [[0, 0.25, 0, 0.75], [1, 0, 0, 0]]
    assert served([[0, -1], [0, -1], [0, -1]], [0], share=share) == [[1, -1], [3, -1], [1, -1]]


def test_merged_tokens_are_served_together():
    # The first row is three tokens: node 0 has 3 when the second comes, and node 2 has 1.
    assert served([[0, 1], [0, 2]], [0], weight=[3, 1]) == [[0, -1], [2, -1]]


@given(seeds)
def test_service_equals_the_loops(seed):
    case = random_case(seed)
    broadcast = set(np.flatnonzero(case.broadcast).tolist())
    expected = oracle.served_nodes(case.share, case.tokens, broadcast, case.seconds_each)
    np.testing.assert_array_equal(run(*case.arrays), expected)


@given(seeds)
def test_visits_and_homes_equal_the_loops(seed):
    case = random_case(seed)
    share, batch, *_ = case.arrays
    decided = run(*case.arrays)
    visits = visits_of(share, batch, decided)
    hosts = oracle.decided_hosts(case.share, case.tokens, np.asarray(decided))
    for token, choices in enumerate(hosts):
        assert set(np.flatnonzero(visits.visited[token]).tolist()) == set().union(*choices)
        if any(choices):
            home = as_weights(visits.lowest_host(), share.shape[1], share.dtype)[token]
            assert np.flatnonzero(home).tolist() == [min(choices[case.tokens.named_choice(token)])]


@given(seeds)
def test_no_token_visits_a_node_it_does_not_visit_without_the_policy(seed):
    case = random_case(seed)
    share, batch, *_ = case.arrays
    decided, static = visits_of(share, batch, run(*case.arrays)), static_visits(share, batch)
    assert (decided.visited <= static.visited).all()


@given(seeds)
def test_every_choice_is_computed_once(seed):
    case = random_case(seed)
    share, batch, *_ = case.arrays
    decided = run(*case.arrays)
    choices = (case.tokens.weight[:, None] * (case.tokens.experts >= 0)).sum()
    assert float(visits_of(share, batch, decided).work.sum()) == choices
    # All choices of broadcast experts are served at a node, and no others.
    moved = (case.tokens.experts >= 0) & case.broadcast[case.tokens.experts]
    np.testing.assert_array_equal(np.asarray(decided) >= 0, moved)


@given(seeds)
def test_tokens_that_are_everywhere_even_out_all_work(seed):
    rng = np.random.default_rng(seed)
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K)
    tokens.weight[:] = 1
    share = np.full((EXPERTS, NODES), 1 / NODES)
    case = Case(share, tokens, np.ones(EXPERTS, bool), np.zeros(EXPERTS), np.ones(NODES))
    work = visits_of(*case.arrays[:2], run(*case.arrays)).work
    assert float(work.max() - work.min()) <= 1


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_batch_of_missing_choices_is_left_alone(broadcast):
    batch = cases.batch(make_tokens([[-1, -1]]))
    assert run(floats(np.eye(4)), batch, jnp.full(4, broadcast), full(4, 1.0)).tolist() == [[-1, -1]]
