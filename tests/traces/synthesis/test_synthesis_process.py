"""What a process refuses, and what its preferences are where nothing is chosen yet."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import synthesis as oracle

from jaxmoe.traces import TraceError


def process(**change):
    made = oracle.random_process(0, layers=2, experts=6, top_k=2, requests=oracle.same_requests(4, 3, topics=(0, 1)))
    return replace(made, **change)


def test_a_process_tells_its_number_of_experts():
    assert process().num_experts == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": (1,)}, "2 layers, but 1 layer ids"),
        ({"layer_ids": (1, 1)}, "names a layer twice"),
        ({"top_k": 7}, "chooses 7 experts"),
        ({"top_k": 0}, "chooses 0 experts"),
        ({"expert_groups": 4}, "expert_groups is 4, expected a divisor of the 6"),
        ({"expert_groups": 0}, "expert_groups is 0"),
        ({"expert_groups": 3, "groups_per_token": 4}, "4 of 3 groups"),
        ({"expert_groups": 3, "groups_per_token": 0}, "0 of 3 groups"),
        ({"expert_groups": 6, "groups_per_token": 1}, "2 experts from 1 of 6 groups of 1"),
        ({"requests": oracle.same_requests(4, 3, topics=(0, 2))}, "name topic 2, but the process has 2"),
    ],
)
def test_parts_that_do_not_fit(change, message):
    with pytest.raises(TraceError, match=message):
        process(**change)


def test_background_is_popularity_topic_phase_and_what_first_tokens_have():
    tables = process().preferences
    found = tables.background(jnp.array([0, 1, 1]), jnp.array([1, 0, 1]), jnp.array([0, 1, 5]))
    for lane, (topic, phase) in enumerate([(0, 1), (1, 0), (1, 1)]):
        expected = np.asarray(tables.popularity) + tables.topics[topic] + tables.phases[phase]
        expected = expected + (tables.first_tokens[0] if lane == 0 else 0)
        np.testing.assert_allclose(found[:, lane], expected, rtol=1e-6)


def test_opening_is_the_mean_over_usual_tokens():
    tables = process().preferences
    for layer in range(2):
        expected = sum(float(tables.usual[layer, e]) * np.asarray(tables.from_token[layer, e]) for e in range(6))
        np.testing.assert_allclose(tables.opening[layer], expected, rtol=1e-5)
