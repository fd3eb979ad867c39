"""The likelihood of choices against loops over them, and against what probabilities and gradients have to be."""

from itertools import permutations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import synthesis as oracle

from jaxmoe.traces.synthesis.fitting import Choices, log_likelihood

TOKENS, LAYERS, EXPERTS, TOP_K, TOPICS = 5, 3, 4, 3, 2
likelihood = jax.jit(log_likelihood)


def random_choices(seed, missing=0.0):
    rng = np.random.default_rng(seed)
    experts, before = rng.random((2, TOKENS, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K]
    for choices in (experts, before):
        choices[rng.random(choices.shape) < missing] = -1
    return Choices(
        experts=jnp.asarray(experts, jnp.int32),
        before=jnp.asarray(before, jnp.int32),
        position=jnp.asarray(rng.integers(3, size=TOKENS), jnp.int32),
        topic=jnp.asarray(rng.integers(TOPICS, size=TOKENS), jnp.int32),
        phase=jnp.asarray(rng.integers(2, size=TOKENS), jnp.int32),
    )


def expected(preferences, choices):
    experts, before = np.asarray(choices.experts), np.asarray(choices.before)
    rest = (np.asarray(leaf).tolist() for leaf in (choices.position, choices.topic, choices.phase))
    return oracle.log_likelihood(jax.tree.map(np.asarray, preferences), experts, before, *rest)


@given(seed=st.integers(0, 2**16), strength=st.sampled_from([0.1, 1.0, 4.0]), missing=st.sampled_from([0.0, 0.3, 1.0]))
def test_equals_the_loop_over_choices(seed, strength, missing):
    preferences = oracle.random_preferences(seed, LAYERS, EXPERTS, TOPICS, strength)
    choices = random_choices(seed, missing)
    found = float(likelihood(preferences, choices))
    assert found == pytest.approx(expected(preferences, choices), rel=1e-4, abs=1e-5)


def test_probabilities_of_all_orders_sum_to_one():
    preferences = oracle.random_preferences(1, LAYERS, EXPERTS, TOPICS)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), jax.device_get(random_choices(1)))

    def with_last(choices) -> float:
        experts = np.array(one.experts)
        experts[:, LAYERS - 1] = choices
        return float(likelihood(preferences, eqx.tree_at(lambda c: c.experts, one, jnp.asarray(experts))))

    logs = np.array([with_last(order) for order in permutations(range(EXPERTS), TOP_K)])
    assert np.exp(logs - with_last(-1)).sum() == pytest.approx(1, rel=1e-4)


def test_gradient_is_the_slope():
    preferences, choices = oracle.random_preferences(2, LAYERS, EXPERTS, TOPICS), random_choices(2)
    gradient = jax.device_get(jax.jit(jax.grad(log_likelihood))(preferences, choices))
    way = oracle.random_preferences(3, LAYERS, EXPERTS, TOPICS)
    slope = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(way), strict=True))
    # The loop is in double precision, so that a small step can be taken.
    step = 1e-4
    wide = [jax.tree.map(lambda p, w, s=s: np.float64(p) + s * np.float64(w), preferences, way) for s in (step, -step)]
    measured = (expected(wide[0], choices) - expected(wide[1], choices)) / (2 * step)
    assert slope == pytest.approx(measured, rel=1e-3)


def test_the_first_table_from_below_has_no_effect():
    preferences, choices = oracle.random_preferences(4, LAYERS, EXPERTS, TOPICS), random_choices(4)
    without = eqx.tree_at(lambda p: p.from_layer, preferences, preferences.from_layer.at[0].set(0.0))
    assert float(likelihood(without, choices)) == float(likelihood(preferences, choices))
