"""How traces are compared: tolerances, and the Zipf baseline that a fit has to beat."""

import numpy as np
import pytest
from oracles import synthesis as oracle

from jaxmoe.traces import GatingTrace, synthetic_trace
from jaxmoe.traces.statistics.concentration import cv
from jaxmoe.traces.synthesis import sample_trace, zipf_trace
from jaxmoe.traces.synthesis.fidelity import TOLERANCES, Tolerance, fidelity_of
from jaxmoe.traces.trace import tally


@pytest.fixture(scope="module")
def trace() -> GatingTrace:
    process = oracle.random_process(0, 2, 8, 2, oracle.same_requests(16, 64))
    return sample_trace(process, 1024, seed=0)


@pytest.mark.parametrize(("recorded", "met"), [(2.0, True), (2.25, True), (2.4, False), (1.0, False)])
def test_a_relative_tolerance_is_a_part_of_the_recorded_figure(recorded, met):
    assert Tolerance(0.125, relative=True).met(recorded, 2.0) == met


@pytest.mark.parametrize(("recorded", "met"), [(0.5, True), (0.625, True), (0.375, True), (0.7, False)])
def test_an_absolute_tolerance_is_a_distance(recorded, met):
    assert Tolerance(0.125, relative=False).met(recorded, 0.5) == met


def test_tolerances_are_written_as_people_read_them():
    assert [str(Tolerance(0.1, relative=True)), str(Tolerance(0.03, relative=False))] == ["10%", "0.03"]


def test_a_trace_is_like_itself(trace):
    found = fidelity_of({"recorded": trace, "again": trace}, 0, lambda *_: None)
    recorded, again = found["recorded"].figures, found["again"].figures
    assert recorded == again
    assert recorded.keys() == TOLERANCES.keys()
    assert recorded["load_kl"] == 0
    assert all(each.met(recorded[name], again[name]) for name, each in TOLERANCES.items())


def test_a_trace_of_other_loads_is_not_like_it(trace):
    other = synthetic_trace(1024, (3, 5), 8, 2, skew=0.0, coactivation=0.0, reuse=0.0, seed=0)
    found = fidelity_of({"recorded": trace, "other": other}, 0, lambda *_: None)
    unmet = {name for name, each in TOLERANCES.items() if not each.met(*(one.figures[name] for one in found.values()))}
    assert unmet >= {"load_kl", "load_max_over_mean", "token_pair_coverage_top20", "layer_pair_coverage_top20"}


def test_figures_that_a_trace_lacks_are_left_out():
    lone = synthetic_trace(64, (0,), 4, 1, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
    figures = fidelity_of({"recorded": lone}, 0, lambda *_: None)["recorded"].figures
    assert TOLERANCES.keys() - figures.keys() == {"layer_pair_coverage_top20", "coactivation_coverage_top10"}


def test_progress_is_told_to_its_end(trace):
    seen = []
    fidelity_of({"a": trace, "b": trace}, 0, lambda *done: seen.append(done))
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("skew", [0.3, 0.8, 1.5])
def test_the_zipf_trace_is_as_unequal(skew):
    recorded = synthetic_trace(4096, (2, 7), 16, 2, skew, coactivation=0.9, reuse=0.5, seed=1)
    drawn = zipf_trace(recorded, seed=0)
    assert (drawn.num_tokens, drawn.top_k, drawn.num_experts, drawn.layer_ids.tolist()) == (4096, 2, 16, [2, 7])
    wanted, found = (float(cv(tally(t.experts, 16)).mean()) for t in (recorded, drawn))
    assert found == pytest.approx(wanted, rel=0.05)


def test_the_zipf_trace_knows_no_relations():
    recorded = synthetic_trace(4096, (2, 7), 16, 2, 0.5, coactivation=0.9, reuse=0.5, seed=1)
    found = fidelity_of({"recorded": recorded, "zipf": zipf_trace(recorded, 0)}, 0, lambda *_: None)
    assert found["zipf"].figures["token_reuse"] < found["recorded"].figures["token_reuse"] - 0.2


def test_even_loads_need_no_skew():
    everything = np.broadcast_to(np.arange(4), (64, 2, 4))
    trace = GatingTrace(everything, 4, np.arange(2), np.zeros(1, int), None, {})
    assert (tally(zipf_trace(trace, 0).experts, 4) == 64).all()
