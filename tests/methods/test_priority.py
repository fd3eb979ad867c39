"""Which experts are broadcast: by hand, against plain loops, and what bounds their number."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import dynamic as oracle
from oracles.arrays import floats, full
from small_dynamic import EXPERTS, random_case

from jaxmoe.methods import choose_experts

choose = jax.jit(choose_experts, static_argnames="limit")

# Node 0 has experts 0 and 1, node 1 half of expert 2 and all of 3, node 2 the other half of 2.
SHARE = floats([[1.0, 0, 0], [1, 0, 0], [0, 0.5, 0.5], [0, 1, 0]])
FORECAST = floats([5.0, 4.0, 8.0, 2.0])


def marked(allowed: int, seconds_each=(1.0, 1.0, 1.0), forecast=FORECAST, limit=4) -> list[int]:
    chosen = choose(SHARE, forecast, jnp.array(seconds_each), jnp.asarray(allowed), limit)
    return np.flatnonzero(chosen).tolist()


def test_experts_leave_the_most_congested_node_by_hand():
    # Seconds 9, 6, 4: expert 0 leaves node 0. Then 4, 6, 4: on node 1, half of expert 2 is more than expert 3.
    # Then 4, 2, 0: expert 1.
    assert [marked(allowed) for allowed in range(5)] == [[], [0], [0, 2], [0, 1, 2], [0, 1, 2, 3]]


def test_seconds_count_and_not_tokens():
    # Node 2 takes thrice as long: 9, 6, 12. Its only expert leaves node 1 as well: 9, 2, 0.
    assert marked(1, (1.0, 1.0, 3.0)) == [2]
    assert marked(2, (1.0, 1.0, 3.0)) == [0, 2]


def test_no_expert_without_work_is_sent():
    assert marked(4, forecast=floats([5.0, 0.0, 8.0, 0.0])) == [0, 2]
    assert marked(4, forecast=full(4, 0.0)) == []


def test_the_limit_holds_where_more_is_allowed():
    assert marked(4, limit=2) == [0, 2]
    assert marked(4, limit=0) == []


@given(st.integers(0, 10**6), st.integers(0, EXPERTS))
def test_choices_equal_the_loops(seed, allowed):
    case = random_case(seed)
    share, _, _, seconds = case.arrays
    found = choose(share, jnp.asarray(case.forecast), seconds, jnp.asarray(allowed), EXPERTS)
    expected = oracle.chosen_experts(case.share, case.forecast, case.seconds_each, allowed)
    assert set(np.flatnonzero(found).tolist()) == expected


@pytest.mark.parametrize("seed", range(3))
def test_vmap_over_layers_and_windows_equals_loops(seed):
    several = [random_case(10 * seed + row) for row in range(3)]
    share = jnp.stack([case.arrays[0] for case in several])
    forecast, seconds = jnp.asarray(np.stack([case.forecast for case in several])), several[0].arrays[3]
    one = partial(choose_experts, limit=4)
    many = jax.jit(jax.vmap(jax.vmap(one, (0, 0, None, None)), (None, None, None, 0)))
    allowed = jnp.arange(5)
    found = many(share, forecast, seconds, allowed)
    assert found.shape == (5, 3, EXPERTS)
    for (k, row), _ in np.ndenumerate(np.zeros((5, 3))):
        np.testing.assert_array_equal(found[k, row], choose(share[row], forecast[row], seconds, allowed[k], 4))
        assert found[k, row].sum() <= k
