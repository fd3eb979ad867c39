"""Layouts whose rows are priced together take as long as each of them by itself."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_exchanges import wide_step
from test_step import GROUPED, LATENT, step_of

from jaxmoe.serving.closed_loop import BACKENDS, OVERHEADS, Users, loop_of, wait
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.merged import kind_of, merged

OF_ROW = np.array([0, 1, 2, 0, 2, 1])
REQUESTS = np.array([[8, 100, 50], [64, 1000, 100], [9, 30, 500], [800, 8000, 10], [3000, 20, 20], [16, 5000, 900.0]])
KINDS = {
    "one group": [{"tensor": tensor} for tensor in (1, 2, 8)],
    "groups": [{"tensor": 1, "data": 4}, {"tensor": 4, "data": 2}, {"tensor": 2, "data": 8}],
    "ranks": [{"tensor": 2, "expert_ranks": 2}, {"tensor": 8, "expert_ranks": 4}, {"tensor": 8, "expert_ranks": 8}],
    "overlap": [
        {"tensor": tensor, "data": data, "expert_ranks": ranks, "overlap": "two_batches"}
        for tensor, data, ranks in ((8, 2, 2), (4, 2, 8), (2, 4, 4))
    ],
}


def waits(step, requests) -> np.ndarray:
    users = Users(*jnp.asarray(requests.T, jnp.float32))
    return np.stack(wait(loop_of(step, users, 40.0, BACKENDS["sglang"]), OVERHEADS["sglang"]))


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_layouts_are_those_of_each(model, kind):
    steps = [step_of(model, **layout) for layout in KINDS[kind]]
    assert len({kind_of(step.deployment) for step in steps}) == 1
    found = waits(merged(steps, OF_ROW), REQUESTS)
    for at, step in enumerate(steps):
        own = np.flatnonzero(at == OF_ROW)
        assert found[:, own] == pytest.approx(waits(step, REQUESTS[own]), rel=2e-6)


def test_deepep_layouts_are_kinds_of_their_own():
    step = wide_step(exchange="deepep_normal")
    other = Deployment("sglang", tensor=2, data=4, expert_ranks=8, exchange="deepep_normal")
    assert kind_of(step.deployment) != kind_of(other)
    rows = np.zeros(6, int)
    assert waits(merged([step], rows), REQUESTS) == pytest.approx(waits(step, REQUESTS), rel=2e-6)


def test_with_two_batches_a_sum_over_one_gpu_has_no_turn():
    one, four = (Deployment("sglang", tensor=count, data=2, overlap="two_batches") for count in (1, 4))
    assert kind_of(one) != kind_of(four)


@pytest.mark.parametrize(
    "other",
    [
        {"data": 2},
        {"expert_ranks": 2},
        {"cache": "fp8"},
        {"experts": "fp8"},
        {"redundant": 8},
        {"overlap": "two_batches"},
        {"drafted": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_has_other_stages_or_kernels_is_of_another_kind(other):
    given = {"tensor": 2, "data": 1} | other
    assert kind_of(Deployment("sglang", **given)) != kind_of(Deployment("sglang", tensor=2))
