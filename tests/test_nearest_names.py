"""Refusals of a name: the nearest of those that are listed is asked for, and no message is changed otherwise."""

import pytest

from jaxmoe.errors import did_you_mean, with_nearest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            'costs.exchange is "coner_host"; expected one of lowest_host, corner_host.',
            " Write one of them.",
        ),
        ("--optimiser is 'corner_hast', expected one of gradient, corner_host, anneal", ""),
        ("kind is \"corner-host\"; expected one of 'mesh', 'corner_host' or 'wafers'.", " Write the kind."),
    ],
)
def test_the_nearest_name_is_asked_for_after_the_list(before, after):
    assert with_nearest(before + after) == f"{before.rstrip('.')}. Did you mean corner_host?{after}"


@pytest.mark.parametrize(
    "message",
    [
        "--optimiser is 'zzz', expected one of gradient, milp-bayes",  # none is near
        "exchange is 'halvin' (did you mean halving?), expected one of halving, ring",
        "a has 'b'; expected one of bb, c; did you mean bb?",
        "link.bandwidth_GB_per_s is -5; expected a number greater than 0. Write 10.",
    ],
)
def test_other_messages_stay_as_they_are(message):
    assert with_nearest(message) == message


def test_only_a_near_name_is_asked_for():
    assert did_you_mean("utilization", ["total", "utilisation"]) == "Did you mean utilisation? "
    assert did_you_mean("utilization", ["total", "p95"]) == ""
