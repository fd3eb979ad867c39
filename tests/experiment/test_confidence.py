"""Confidence from a sample: intervals over windows, and the tokens that would settle a doubt."""

import json

import numpy as np
import pytest

from jaxmoe.experiment.confidence import SampledGain, whole_steps


def gain_of(values, tokens=1000.0):
    return SampledGain(np.asarray(values, float), tokens, 0.01)


@pytest.mark.parametrize(
    ("values", "worth", "confidence"),
    [
        ([0.05, 0.06, 0.05, 0.07, 0.06, 0.05], True, "high"),  # all far above 0
        ([0.30, -0.25, 0.28, -0.2], True, "low"),  # the sign is not known
        ([0.05, 0.06], True, "high"),
        ([0.05, 0.10], True, "low"),  # of two windows nearly nothing is known
        ([0.001, -0.001, 0.002, 0.0, 0.001, -0.002], False, "high"),  # nothing worth having
        ([0.05, -0.045, 0.03, -0.03], False, "low"),
        ([0.2], True, "low"),
    ],
)
def test_confidence_follows_from_the_interval(values, worth, confidence):
    gain = gain_of(values)
    assert (gain.is_worth_it, gain.confidence) == (worth, confidence)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_intervals_cover_the_truth_about_as_often_as_they_say(count):
    rng, trials = np.random.default_rng(5), 300
    covered = 0
    for _ in range(trials):
        low, high = gain_of(rng.normal(0.03, 0.05, count)).interval
        covered += low <= 0.03 <= high
    assert 0.91 <= covered / trials <= 0.99


def test_the_tokens_that_settle_a_doubt_do_so():
    """Gains of twice the spread need four times the tokens; as many windows as told, and a few more, are sure."""
    rng = np.random.default_rng(0)
    doubtful = gain_of(0.02 + 0.05 * np.resize([1, -1], 8), tokens=800.0)
    wider = gain_of(0.02 + 0.10 * np.resize([1, -1], 8), tokens=800.0)
    assert doubtful.confidence == wider.confidence == "low"
    assert wider.tokens_to_settle == pytest.approx(4 * doubtful.tokens_to_settle, rel=1e-6)
    more = int(np.ceil(1.3 * doubtful.tokens_to_settle / 100))  # a window has 100 tokens
    assert gain_of(rng.permutation(0.02 + 0.05 * np.resize([1, -1], more - more % 2))).is_sure
    assert gain_of([0.01, 0.03, -0.01]).tokens_to_settle > 1e12  # just as much as is worth it


def test_a_report_has_no_number_for_what_a_single_window_does_not_tell():
    report = gain_of([0.2]).report()
    assert (report["sampled_gain"]["interval"], report["tokens_to_settle"]) == ([None, None], None)
    json.dumps(report, allow_nan=False)


def test_windows_become_whole_steps():
    windows = np.ones((12, 2, 5))  # 60 choices in each layer
    assert whole_steps(windows, 10.0).shape == (6, 2, 5)
    assert (whole_steps(windows, 10.0).sum(axis=2) == 10).all()
    assert len(whole_steps(windows, 40.0)) == 4  # fewer than a step in each, but enough to compare
    assert len(whole_steps(windows, 1.0)) == 12
    assert len(whole_steps(windows[:3], 10.0)) == 3
    assert whole_steps(windows, 25.0).sum() == windows.sum()
