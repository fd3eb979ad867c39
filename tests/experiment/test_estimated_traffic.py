"""The linear node estimate beside link model and simulator, on random plans of a small machine."""

import numpy as np
import pytest

from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.validation import BALANCED, fitted_gamma, node_traffic, random_plans


@pytest.fixture
def inputs(scenario):
    return read_inputs(scenario, None, None, None)


def test_plans_are_legal_and_full_nodes_have_even_work(inputs):
    load = np.bincount(inputs.trace.experts[:, 0].ravel(), minlength=4) + 0.1
    for kind, share in random_plans(inputs, 3):
        assert (share >= 0).all()
        np.testing.assert_allclose(share.sum(axis=1), 1)
        if kind == BALANCED:
            np.testing.assert_allclose(load @ share, load.sum() / 4)
        if kind == "whole experts":
            assert ((share > 0).sum(axis=1) == 1).all()


def test_simulated_times_follow_the_link_model_and_not_the_nodes(inputs):
    seen = node_traffic(inputs, tokens=32, plans=4)
    assert len(seen.kind) == 12
    np.testing.assert_allclose(seen.link_model, seen.simulated, rtol=0.05)  # a chunk more or less on a path of two
    assert not np.allclose(seen.estimate * seen.fit.gamma, seen.simulated, rtol=0.05)


def test_gamma_is_that_of_full_nodes(inputs):
    seen = node_traffic(inputs, tokens=8).of(BALANCED)
    assert set(seen.kind) == {BALANCED}
    expected = seen.estimate @ seen.simulated / (seen.estimate @ seen.estimate)
    assert fitted_gamma(inputs).gamma == pytest.approx(expected)
    assert expected > 0
