"""hd_moe's linear estimate of communication, and what scales it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases
from oracles.compilations import compilations
from small_problem import EXPERTS, NODES, TOP_K, random_shares, small_model, small_problem

from jaxmoe.tune.node_balance import fit_gamma, mean_bandwidth, node_estimate, node_estimates

estimated = eqx.filter_jit(node_estimate)


def looped_estimate(share, tokens, message_bytes, bandwidth) -> float:
    """Eq. 2 token by token, as its text explains it."""
    volume = np.zeros(share.shape[1])
    for experts, weight in zip(tokens.experts, tokens.weight, strict=True):
        for node in range(share.shape[1]):
            if any(expert >= 0 and share[expert, node] > 0 for expert in experts):
                volume[node] += weight * message_bytes
    return max(volume) / bandwidth


@given(st.integers(0, 2**32 - 1))
def test_the_estimate_is_that_of_plain_loops(seed):
    rng = np.random.default_rng(seed)
    share = cases.random_share(rng, EXPERTS, NODES)
    tokens = cases.random_tokens(rng, 9, EXPERTS, TOP_K, missing=True)
    model, bandwidth = small_model(seed % 5), rng.uniform(1e8, 1e10)
    estimate = estimated(model, share.astype(np.float32), cases.batch(tokens), jnp.float32(bandwidth))
    expected = looped_estimate(share, tokens, float(model.costs.combine_bytes), bandwidth)
    np.testing.assert_allclose(estimate, expected, rtol=1e-5)


def test_many_plans_and_batches_at_once_over_the_mean_link():
    problem = small_problem()
    shares = random_shares(np.random.default_rng(0), 3)[0]
    batches = jax.tree.map(lambda leaf: np.asarray(leaf)[0], problem.draw(4, seed=1))
    estimates = node_estimates(problem.model, shares, batches)
    assert estimates.shape == (3, 4)
    one = jax.tree.map(lambda leaf: leaf[2], batches)
    np.testing.assert_allclose(
        np.asarray(estimates)[1, 2], estimated(problem.model, shares[1], one, mean_bandwidth(problem.model)), rtol=1e-6
    )
    mean = float(np.mean(problem.model.machine.topology.link_bandwidth))
    np.testing.assert_allclose(
        node_estimates(problem.model, shares, batches, mean / 2), 2 * np.asarray(estimates), rtol=1e-5
    )
    faster, others = small_model(link_factor=3.0), random_shares(np.random.default_rng(1), 3)[0]
    with compilations() as compiled:
        node_estimates(faster, others, batches)
    assert compiled == []


def test_an_exact_line_is_found():
    fit = fit_gamma(np.array([[1.0, 2.0], [5.0, 0.5]]), np.array([[3.0, 6.0], [15.0, 1.5]]))
    assert fit.gamma == pytest.approx(3)
    assert fit.r2 == pytest.approx(1)


def test_a_line_through_the_origin_by_hand():
    # gamma = (1*1 + 2*3) / (1 + 4) = 1.4; residuals -0.4 and 0.2; deviations from the mean 2: -1 and 1.
    fit = fit_gamma(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    assert fit.gamma == pytest.approx(1.4)
    assert fit.r2 == pytest.approx(1 - (0.16 + 0.04) / 2)


@pytest.mark.parametrize(("x", "y"), [([0, 0], [1, 2]), ([1, 2], [3, 3]), ([1], [1])])
def test_what_cannot_be_fitted_is_refused(x, y):
    with pytest.raises(ValueError, match=r"gamma cannot be fitted to .* give times of plans"):
        fit_gamma(np.array(x, float), np.array(y, float))
