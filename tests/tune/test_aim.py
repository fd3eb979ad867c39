"""What is minimised of the times of batches that come from topics in turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.relax import SmoothMax
from jaxmoe.tune.objective import Objective

SECONDS = jnp.asarray([1.0, 10.0, 3.0, 20.0])  # of topics 0, 1, 0, 1: means 2 and 15


@pytest.mark.parametrize(("worst_weight", "expected"), [(0.0, 8.5), (0.5, 11.75), (1.0, 15.0)])
def test_mean_and_worst_by_hand(worst_weight, expected):
    assert float(Objective(worst_weight=worst_weight, topics=2)(SECONDS)) == pytest.approx(expected)


def test_the_tail_is_of_every_topic_by_itself():
    """The 95th percentiles of 1, 3 and of 10, 20 are 2.9 and 19.5."""
    np.testing.assert_allclose(Objective(p95_weight=1.0, topics=2).by_topic(SECONDS), [2.9, 19.5], rtol=1e-6)


def test_a_topic_with_more_batches_counts_no_more():
    assert float(Objective(topics=2)(jnp.asarray([1.0, 10.0, 3.0]))) == pytest.approx((2 + 10) / 2)


def test_fewer_batches_than_topics():
    assert float(Objective(worst_weight=1.0, topics=5)(jnp.asarray([1.0, 4.0]))) == pytest.approx(4)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.125, 100, width=32), min_size=6, max_size=6),
    st.floats(0, 1, width=32),
    st.sampled_from([1, 2, 3]),
)
def test_it_lies_between_mean_and_worst_wherever_the_batches_begin(seconds, worst_weight, topics):
    times, aim = np.array(seconds), Objective(worst_weight=worst_weight, topics=topics)
    means = times.reshape(-1, topics).mean(axis=0)
    value = float(aim(jnp.asarray(times)))
    assert means.mean() * (1 - 1e-5) <= value <= means.max() * (1 + 1e-5)
    assert value == pytest.approx(float(aim(jnp.asarray(np.roll(times, 1)))), rel=1e-5)


def test_the_smooth_worst_tends_to_the_worst_and_has_its_slope():
    aim = Objective(worst_weight=1.0, topics=2)
    soft = [float(aim(SECONDS, SmoothMax(temperature))) for temperature in (1.0, 0.1, 0.001)]
    assert soft[0] > soft[1] >= soft[2] == pytest.approx(15)
    slope = jax.grad(lambda seconds: aim(seconds, SmoothMax(0.5)))(SECONDS)
    for batch in range(4):
        moved = [aim(SECONDS.at[batch].add(change), SmoothMax(0.5)) for change in (0.05, -0.05)]
        assert float(slope[batch]) == pytest.approx(float(moved[0] - moved[1]) / 0.1, rel=2e-3)
    assert (np.asarray(slope) > 0).all()  # all topics pull, those that are not the worst too
