"""That a process fitted to a trace draws traces like it, and what it makes of traces that lack something."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import synthesis as oracle

from jaxmoe.traces import GatingTrace, read_trace, synthetic_trace
from jaxmoe.traces.statistics import count_pairs, kl
from jaxmoe.traces.synthesis import fit_process, fitting, sample_trace
from jaxmoe.traces.synthesis.fidelity import TOLERANCES, fidelity_of
from jaxmoe.traces.trace import tally

REQUESTS, LENGTH, PROMPT = 32, 128, 40
TOKENS = REQUESTS * LENGTH
WITHIN = {
    "load_kl": 0.01,
    "token_reuse": 0.03,
    "token_pair_coverage_top20": 0.05,
    "layer_pair_coverage_top20": 0.05,
    "coactivation_coverage_top10": 0.05,
}


def compare(recorded, drawn):
    found = fidelity_of({"recorded": recorded, "drawn": drawn}, 0, lambda *_: None)
    return found["recorded"].figures, found["drawn"].figures


@pytest.fixture(scope="module")
def recorded():
    """A trace with every kind of relation, and with topics in its recorded order."""
    requests = oracle.same_requests(REQUESTS, LENGTH, PROMPT, topics=(0, 1))
    return sample_trace(oracle.random_process(5, 2, 8, 2, requests, strength=0.7), TOKENS, seed=0)


@pytest.fixture(scope="module")
def fitted(recorded):
    return fit_process(recorded, seed=0)


@pytest.fixture
def quick(monkeypatch):
    """Few steps: enough to see what a fit makes of the shape of a trace, not for its figures."""
    monkeypatch.setattr(fitting, "STEPS", fitting.STEPS_PER_CALL)
    monkeypatch.setattr(fitting, "CORRECTIONS", 1)


def test_drawn_traces_have_the_figures_of_the_recorded_one(recorded, fitted):
    known, drawn = compare(recorded, sample_trace(fitted, TOKENS, seed=10**6))
    for name, within in WITHIN.items():
        assert drawn[name] == pytest.approx(known[name], abs=within), name


def test_a_process_has_the_shape_and_the_requests_of_the_trace(recorded, fitted):
    assert (fitted.layer_ids, fitted.top_k, fitted.num_experts) == ((3, 5), 2, 8)
    assert fitted.requests.length.tolist() == [LENGTH] * REQUESTS
    assert fitted.requests.prompt.tolist() == [PROMPT] * REQUESTS
    assert all("synthetic" in fact for fact in fitted.facts.values())
    assert "m" in fitted.facts["model"].split()
    for table in jax.tree.leaves(fitted.preferences):
        assert np.isfinite(table).all()


def test_where_there_is_no_structure_none_is_found():
    trace = synthetic_trace(TOKENS, (3, 5), 8, 2, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
    tables = fit_process(trace, seed=0).preferences
    for name in ("from_layer", "from_token", "together", "phases"):
        assert np.abs(getattr(tables, name)).mean() < 0.15, name


def test_the_same_seed_gives_the_same_process(recorded, quick):
    one, other = (fit_process(recorded, seed=1) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one.preferences), jax.tree.leaves(other.preferences), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_second_fit_compiles_nothing(recorded, quick):
    fit_process(recorded, seed=1)
    compiled = fitting._ascend._cache_size()
    fit_process(recorded, seed=2)
    assert fitting._ascend._cache_size() == compiled


def test_every_stage_is_reported_to_its_end(recorded, quick):
    seen = []
    fit_process(recorded, 1, lambda *done: seen.append(done))
    assert seen == [("fit", 0, 50), ("fit", 50, 50), ("correct", 0, 1), ("correct", 1, 1)]


def test_long_requests_are_cut(recorded, quick, monkeypatch):
    monkeypatch.setattr(fitting, "LONGEST_REQUEST", LENGTH)
    one = replace(recorded, seq_start=np.zeros(1, int), seq_name=("all",))
    process = fit_process(one, seed=1)
    assert process.requests.length.tolist() == [LENGTH] * REQUESTS
    assert process.requests.prompt.tolist() == [PROMPT] * REQUESTS


def test_of_a_long_trace_requests_from_all_over_it_are_used(recorded, quick, monkeypatch):
    monkeypatch.setattr(fitting, "MOST_TOKENS", TOKENS // 2)
    prompts = np.arange(REQUESTS)
    phase = (np.arange(LENGTH) >= prompts[:, None]).ravel().astype(int)
    process = fit_process(replace(recorded, phase=phase), seed=1)
    assert process.requests.prompt.tolist() == prompts[::2].tolist()


def test_missing_choices_count_nowhere(recorded, quick):
    experts = recorded.experts.copy()
    experts[np.random.default_rng(0).random(experts.shape) < 0.3] = -1
    process = fit_process(replace(recorded, experts=experts), seed=1)
    drawn = sample_trace(process, TOKENS, seed=9)
    assert (kl(tally(experts, 8), tally(drawn.experts, 8)) < 0.05).all()


@pytest.mark.parametrize(
    ("layers", "top_k", "requests"),
    [(1, 2, 8), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1, 8), (2, 2, 1)))],
    ids=["layer", "choice", "request"],
)
def test_one_of_a_kind_is_enough(quick, layers, top_k, requests):
    deck = oracle.same_requests(requests, 512 // requests)
    trace = sample_trace(oracle.random_process(1, layers, 6, top_k, deck), 512, seed=0)
    process = fit_process(trace, seed=0)
    drawn = sample_trace(process, 512, seed=5)
    assert (kl(tally(trace.experts, 6), tally(drawn.experts, 6)) < 0.1).all()
    assert process.requests.prompt is None


def test_tokens_that_choose_every_expert(quick):
    trace = synthetic_trace(512, (0, 1), 2, 2, skew=1.0, coactivation=0.0, reuse=0.0, seed=0)
    drawn = sample_trace(fit_process(trace, seed=0), 512, seed=1)
    assert (np.sort(drawn.experts, axis=2) == [0, 1]).all()


@pytest.mark.parametrize(("run", "low", "high"), [(4, 0.6, 1.0), (1, 0.0, 0.1)])
def test_drift_is_how_much_topics_come_in_runs(recorded, quick, run, low, high):
    """Requests of eight topics in runs; tokens of each choose two of three experts."""
    topic = np.repeat(np.arange(REQUESTS) // run % 8, LENGTH)[:, None, None]
    choices = np.random.default_rng(0).random((TOKENS, 2, 3)).argsort(axis=2)[..., :2]
    process = fit_process(replace(recorded, experts=(choices + topic) % 8), seed=1)
    assert low <= process.requests.drift <= high


def test_a_choice_below_tells_of_the_one_above(fitted, recorded):
    """The fitted relation from layer to layer is the planted one, up to what shifts all weights alike."""
    planted = oracle.random_preferences(5, 2, 8, topics=2, strength=0.7).from_layer[1]
    found = fitted.preferences.from_layer[1]
    centred = [np.ravel(table - jnp.mean(table, axis=1, keepdims=True)) for table in (planted, found)]
    assert np.corrcoef(*centred)[0, 1] > 0.8


def test_nothing_is_corrected_where_figures_agree(recorded, fitted):
    counts = count_pairs(recorded)
    shifted = fitting._shifted(fitted.preferences, counts, counts, gain=0.7)
    for a, b in zip(jax.tree.leaves(shifted), jax.tree.leaves(fitted.preferences), strict=True):
        np.testing.assert_array_equal(a, b)


def test_corrections_go_towards_the_recorded_figures(recorded, fitted):
    """Against a trace that is even in everything: its loads and coverage are less, and its reuse."""
    even = synthetic_trace(TOKENS, (3, 5), 8, 2, skew=0.0, coactivation=0.0, reuse=0.0, seed=0)
    before, counts, drawn = fitted.preferences, count_pairs(recorded), count_pairs(even)
    after = fitting._shifted(before, counts, drawn, gain=0.5)
    pushed, missing = after.popularity - before.popularity, np.log((counts.load + 1) / (drawn.load + 1))
    np.testing.assert_allclose(pushed, missing / 2, atol=1e-4)
    for name in ("from_layer", "together"):
        ratio = np.asarray(getattr(after, name)[1] / getattr(before, name)[1])
        assert (ratio[np.isfinite(ratio)] > 1).all(), name
    stretch = jnp.median(after.from_token / before.from_token, axis=(1, 2), keepdims=True)  # most are off the diagonal
    stays = np.einsum("lee->l", after.from_token - stretch * before.from_token)
    assert (counts.reuse > drawn.reuse).all()
    assert (stays > 0).all()


@pytest.mark.slow
def test_a_real_trace_keeps_every_tolerance(shared):
    trace = read_trace(shared / "traces" / "mixtral-8x7b" / "reasoning.npz")
    trace = trace.select_layers(trace.layer_ids[[0, 10, 20, 30]].tolist())
    drawn = sample_trace(fit_process(trace, seed=0), trace.num_tokens, seed=10**6)
    known, found = compare(trace, drawn)
    assert {name for name, each in TOLERANCES.items() if not each.met(known[name], found[name])} == set()


def test_requests_that_begin_alike_are_drawn_so():
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((60 * 50, 2, 6)), axis=-1)[..., :2].astype(np.int16)
    start = np.arange(0, len(experts), 50)
    for position in range(4):
        experts[start + position] = [[position, 5], [5, position]]
    trace = GatingTrace(experts, 6, np.arange(2), start, None, {})
    drawn = sample_trace(fit_process(trace, seed=0), trace.num_tokens, seed=1)
    for position in range(4):
        chosen = np.sort(drawn.experts[drawn.seq_start + position], axis=-1)
        assert (chosen == [position, 5]).all(axis=-1).mean() > 0.6  # by chance 1 / 15


def test_of_a_long_trace_requests_from_all_over_it_are_fitted(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_TOKENS", 100)
    experts = np.arange(400, dtype=np.int16)[:, None, None]
    trace = GatingTrace(experts, 400, np.arange(1), np.arange(0, 400, 10), None, {})
    part = fitting.fitted_part(trace)
    assert part.experts[part.seq_start, 0, 0].tolist() == list(range(0, 400, 40))
    assert part.num_tokens == 100
    assert fitting.fitted_part(part) is part
