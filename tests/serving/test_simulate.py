"""Engines over time: by hand, the compiled simulator against the plain one, and laws that hold for all of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from online_scenarios import SECOND, assert_same, both, constant, drawn_changes, drawn_scenario, requests_of, times_of
from oracles.serving import serve_plainly

from jaxmoe.errors import InputError
from jaxmoe.serving.online.changes import Change
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet, Reserve
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import FEATURES, StepTable, Term


def test_a_prompt_is_read_in_chunks_of_the_budget():
    served = both(requests_of((0, 10, 3)), Fleet(Engine(token_budget=4)))
    assert times_of(served) == [[3, 4, 5]]
    assert served.steps is not None
    assert list(served.steps.tokens) == [4, 4, 2, 1, 1]


@pytest.mark.parametrize(("batching", "expected"), [("vllm", [[1, 2, 3], [3]]), ("sglang", [[1, 4, 5], [3]])])
def test_chunks_are_read_beside_decoding_or_before_it(batching, expected):
    requests = requests_of((0, 4, 3), (0.5, 6, 1))
    assert times_of(both(requests, Fleet(Engine(batching, token_budget=4)))) == expected


def test_one_seat_is_taken_in_turn():
    served = both(requests_of((0, 1, 2), (0, 1, 2), (0.5, 1, 1)), Fleet(Engine(seats=1)))
    assert times_of(served) == [[1, 2], [3, 4], [5]]
    assert list(served.scheduled) == [0, 2, 4]


def test_who_came_last_is_computed_anew_when_blocks_run_out():
    """Four blocks of two tokens. In the third step the first request needs a third block: the second gives its two up,
    waits while the first has three, and is read anew with the two tokens that it had."""
    served = both(requests_of((0, 3, 4), (0, 3, 4)), Fleet(Engine(token_budget=16, kv_blocks=4, block_tokens=2)))
    assert times_of(served) == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert list(served.preemptions) == [0, 1]
    assert served.steps is not None
    assert list(served.steps.tokens) == [6, 2, 1, 1, 5, 1]
    assert list(served.steps.kv_blocks) == [4, 4, 3, 3, 3, 3]


def test_sglang_begins_what_fits_with_its_output():
    """Twenty-four tokens. At 1 s the second needs 5 + 3 + 1 of the 16 that are free less half of the first's 5 to come.
    The third would need as many of the 11 left, less these and the 3 + 1 of the second: 4.5. Only when the second is
    done and another step decodes is it looked at again, where a quarter of two tokens is kept after three steps."""
    engine = Engine("sglang", kv_blocks=24, block_tokens=1, reserve=Reserve(first=0.5, least=0.25, decay=0.125))
    served = both(requests_of((0, 8, 6), (0.5, 5, 3), (0.5, 5, 3)), Fleet(engine))
    assert times_of(served) == [[1, 3, 4, 5, 7, 8], [2, 3, 4], [6, 7, 8]]
    assert served.steps is not None
    assert list(served.steps.kv_blocks) == [8, 13, 15, 17, 11, 16, 18, 20]


@pytest.mark.parametrize(("cache", "read"), [(False, 11), (True, 5)])
def test_sglang_retracts_who_has_done_least(cache, read):
    """Twenty-seven tokens, 25 of which hold something at 6 s, and three that decode have 5 of their outputs each: the
    longest prompt is retracted, not who came last. It waits behind the fourth, and as three quarters, (10 + 2) / 16, of
    what the second may still have are kept by then, for one more step: 14 do not fit into 12.75, nor 8 into 6.75. The
    cache has its 6 tokens of prompt, not those of its output."""
    engine = Engine("sglang", kv_blocks=27, block_tokens=1, prefix_cache=cache, reserve=Reserve(0.0, 0.0, 0.0, 1))
    served = both(requests_of((0, 6, 7), (0, 2, 9), (0.5, 5, 6), (5.5, 3, 1)), Fleet(engine))
    assert served.steps is not None
    assert served.steps.tokens[served.steps.start == 8] == [read]
    assert times_of(served) == [[1, 3, 4, 5, 6, 9, 10], [1, 3, 4, 5, 6, 7, 10, 11, 12], [2, 3, 4, 5, 6, 7], [8]]
    assert list(served.preemptions) == [1, 0, 0, 0]


def test_sglang_fills_a_seat_once_others_have_decoded():
    requests = requests_of((0, 1, 2), (0, 1, 4), (0, 1, 1))
    assert times_of(both(requests, Fleet(Engine("sglang", seats=2)))) == [[1, 2], [1, 2, 3, 5], [4]]
    assert times_of(both(requests, Fleet(Engine("vllm", seats=2)))) == [[1, 2], [1, 2, 3, 4], [3]]


def test_prompts_that_begin_alike_are_read_once():
    """The second has all of the first's text and more; the third just that, so its last block is read again; the fourth
    has the same name behind another text."""
    names = [[1, 2], [1, 2], [1, 2], [5, 2]]
    requests = requests_of((0, 8, 1), (2, 9, 1), (4, 8, 1), (6, 8, 1), names=names)
    served = both(requests, Fleet(Engine(kv_blocks=20, block_tokens=2, prefix_cache=True)))
    assert list(served.cached) == [0, 8, 6, 0]
    assert list(both(requests, Fleet(Engine(kv_blocks=20, block_tokens=2))).cached) == [0, 0, 0, 0]


def test_the_cache_loses_what_was_used_least_lately():
    """Room for two texts: the third takes that of the first, and the second, used since, outlives the third."""
    rows = [(10.0 * at, 4, 1) for at in range(6)]
    requests = requests_of(*rows, names=[[1], [2], [3], [2], [1], [2]])
    served = both(requests, Fleet(Engine(kv_blocks=4, block_tokens=2, prefix_cache=True)))
    assert list(served.cached) == [0, 0, 0, 2, 0, 2]


def test_ranks_end_a_step_together():
    per_token = StepTable((Term("tokens", ("tokens",), (np.array([0.0, 1.0]),), np.array([0.0, 1.0])),))
    served = both(requests_of((0, 3, 2), (0, 5, 1)), Fleet(Engine(ranks=2)), per_token)
    assert list(served.rank) == [0, 1]
    assert times_of(served) == [[5, 6], [5]]


def test_kv_travels_to_engines_that_decode():
    pool = DecodePool(Engine(), kv_bytes_per_token=2.0, bytes_per_s=20.0, latency_s=0.5)
    served = both(requests_of((0, 10, 3), (0, 10, 1)), Fleet(Engine(), decode=pool))
    assert times_of(served) == [[1, 3.5, 4.5], [1]]
    assert list(served.decode_engine) == [1, -1]


def test_a_batch_made_ahead_leaves_out_who_comes_meanwhile():
    requests = requests_of((0, 1, 5), (0.5, 1, 1))
    at_once, ahead = (both(requests, Fleet(Engine(lookahead=each))) for each in (False, True))
    assert times_of(at_once) == [[1, 2, 3, 4, 5], [2]]
    assert times_of(ahead) == [[1, 2, 3, 4, 5], [3]]
    assert list(at_once.queued) == list(ahead.queued) == [0, 1]


def test_steps_take_another_table_from_a_time_on():
    """The step that begins at 2 is the first to take 0.5 s, after weights have moved for 0.25 s."""
    served = both(requests_of((0, 1, 6)), Fleet(Engine()), SECOND, Change(1.5, constant(0.5), pause=0.25))
    assert times_of(served) == [[1, 2, 2.75, 3.25, 3.75, 4.25]]
    assert served.steps is not None
    np.testing.assert_allclose(served.steps.seconds, [1, 1, 0.75, 0.5, 0.5, 0.5])


def test_a_step_that_begins_with_a_change_takes_its_table():
    assert times_of(both(requests_of((0, 1, 3)), Fleet(Engine()), SECOND, Change(1.0, constant(3.0)))) == [[1, 4, 7]]


def test_changes_before_one_step_add_up_and_wait_for_it():
    """The engine is idle from 1 s on, until a request comes at 5 s; the other engine is not changed."""
    changes = Change(2.0, constant(9.0), 0.5), Change(3.0, constant(2.0), 0.25)
    served = both(requests_of((0, 1, 1), (0, 1, 1), (5, 1, 2), (5, 1, 2)), Fleet(Engine(), 2), SECOND, *changes)
    assert times_of(served) == [[1], [1], [7.75, 9.75], [6, 7]]


def test_engines_of_a_decode_pool_change_too():
    pool = DecodePool(Engine(), kv_bytes_per_token=0.0, bytes_per_s=1.0)
    served = both(requests_of((0, 1, 3)), Fleet(Engine(), decode=pool), SECOND, Change(0.0, constant(4.0), engine=1))
    assert times_of(served) == [[1, 5, 9]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([Change(0.0, SECOND, engine=1)], r"changes\[0\]\.engine is 1; expected 0 to 0"),
        ([Change(3.0, SECOND), Change(2.0, SECOND)], r"changes\[1\]\.at is 2 s, after one at 3 s"),
        ([Change(np.nan, SECOND)], r"changes\[0\]\.at is nan"),
        ([Change(0.0, SECOND, pause=-1.0)], r"changes\[0\]\.pause is -1 s"),
        ([Change(0.0, SECOND, pause=np.inf)], r"changes\[0\]\.pause is inf s"),
    ],
)
def test_changes_that_cannot_be(changes, told):
    for simulate in (serve, serve_plainly):
        with pytest.raises(InputError, match=told):
            simulate(requests_of((0, 1, 1)), Fleet(Engine()), SECOND, changes=changes)


def test_routers():
    requests = requests_of((0, 1, 9), (0, 1, 1), (2, 1, 1), (2, 1, 1))
    assert list(both(requests, Fleet(Engine(), 2)).engine) == [0, 1, 0, 1]
    assert list(both(requests, Fleet(Engine(), 2, "least_loaded")).engine) == [0, 1, 1, 0]


def test_a_user_sends_the_next_request_when_one_ends():
    served = both(requests_of((0, 1, 2), (0, 1, 3), (0, 1, 1), (9, 1, 1)), Fleet(Engine(), users=2))
    assert list(served.sent) == [0, 0, 2, 9]
    assert times_of(served) == [[1, 2], [1, 2, 3], [3], [10]]


@pytest.mark.parametrize("seed", range(50))
def test_compiled_as_plain(seed):
    requests, fleet, table, decode_table = drawn_scenario(seed)
    plain = serve_plainly(requests, fleet, table, decode_table)
    assert_same(plain, serve(requests, fleet, table, decode_table, token_times=True, steps=True))
    brief = replace(plain, token_starts=np.zeros(0, int), token_times=np.zeros(0), steps=None)
    assert_same(brief, serve(requests, fleet, table, decode_table))


@pytest.mark.parametrize("seed", range(50))
def test_compiled_as_plain_with_changes(seed):
    requests, fleet, table, decode_table = drawn_scenario(seed)
    changes = drawn_changes(seed, fleet)
    plain = serve_plainly(requests, fleet, table, decode_table, changes)
    assert_same(plain, serve(requests, fleet, table, decode_table, token_times=True, steps=True, changes=changes))
    brief = replace(plain, token_starts=np.zeros(0, int), token_times=np.zeros(0), steps=None)
    assert_same(brief, serve(requests, fleet, table, decode_table, changes=changes))


@pytest.mark.parametrize("seed", range(50))
def test_steps_of_one_rank_that_change_with_contexts_alone_are_as_plain(seed):
    """They follow each other inside a cell of the table; to the last bit as where each is written down."""
    requests, fleet, *tables = drawn_scenario(seed)
    table, decode_table = (without_longest(each) for each in tables)
    decode = fleet.decode and replace(fleet.decode, engine=replace(fleet.decode.engine, ranks=1))
    fleet = replace(fleet, engine=replace(fleet.engine, ranks=1), decode=decode)
    brief = serve(requests, fleet, table, decode_table)
    written = serve(requests, fleet, table, decode_table, token_times=True, steps=True)
    for name in ("scheduled", "first_token", "finish", "engine", "cached", "preemptions"):
        np.testing.assert_array_equal(getattr(brief, name), getattr(written, name))
    assert_same(serve_plainly(requests, fleet, table, decode_table), written)


def without_longest(table: StepTable) -> StepTable:
    """The table without what the longest context adds, so that one term changes from step to step."""
    terms = [
        term._replace(features=term.features[:2], grids=term.grids[:2], values=term.values[..., 0])
        if term.name == "decode"
        else term
        for term in table.terms
    ]
    return StepTable(tuple(terms))


@given(seed=st.integers(100, 10**6))
@settings(max_examples=50)
def test_changes_to_what_is_there_change_nothing(seed):
    """To the last bit: steps that are skipped over stop at them, and go on as they were."""
    requests, fleet, table, decode_table = drawn_scenario(seed)
    tables = [table] * fleet.engines + [decode_table] * (fleet.all_engines - fleet.engines)
    changes = [
        Change(at, tables[engine], 0.0, engine) for at in (0.0, 0.011, 0.3, 1.7) for engine in range(len(tables))
    ]
    before = serve(requests, fleet, table, decode_table, token_times=True)
    after = serve(requests, fleet, table, decode_table, token_times=True, changes=changes)
    np.testing.assert_array_equal(after.token_times, before.token_times)


def test_changes_of_random_scenarios_matter():
    scenarios = [drawn_scenario(seed) for seed in range(50)]
    ends = [
        (serve(*each).finish, serve(*each, changes=drawn_changes(seed, each.fleet)).finish)
        for seed, each in enumerate(scenarios)
    ]
    assert sum(not np.array_equal(before, after) for before, after in ends) > 40


def test_random_scenarios_have_all_that_can_happen():
    scenarios = [drawn_scenario(seed) for seed in range(50)]
    every = [serve(*scenario) for scenario in scenarios]
    assert sum((served.preemptions > 0).sum() for served in every) > 20
    assert sum((served.cached > 0).sum() for served in every) > 100
    assert sum((served.decode_engine >= 0).sum() for served in every) > 100


@given(seed=st.integers(100, 10**6))
@settings(max_examples=100)
def test_laws(seed):
    """No request is lost, KV is never over its size, no token is computed twice unless its request is preempted."""
    requests, fleet, table, decode_table = drawn_scenario(seed)
    served = serve(requests, fleet, table, decode_table, token_times=True, steps=True)
    for row, times in enumerate(times_of(served)):
        assert len(times) == requests.output[row]
        assert requests.arrival[row] <= served.sent[row] <= served.queued[row] <= served.scheduled[row] < times[0]
        assert (np.diff(times) > 0).all()
    steps = served.steps
    assert steps is not None
    for number, engine in enumerate([fleet.engine, *([fleet.decode.engine] if fleet.decode else [])]):
        own = (steps.engine >= fleet.engines) == (number == 1)
        if engine.kv_blocks is not None:
            assert (steps.kv_blocks[own] <= engine.kv_blocks * engine.ranks).all()
        assert (steps.running[own] <= engine.seats * engine.ranks).all()
        if engine.batching == "vllm":
            assert (steps.tokens[own] <= engine.token_budget * engine.ranks).all()
    if not served.preemptions.any():
        assert steps.tokens.sum() == (requests.prompt - served.cached + requests.output - 1).sum()


@given(seed=st.integers(100, 10**6))
def test_first_come_first_served(seed):
    requests, fleet, table, decode_table = drawn_scenario(seed)
    served = serve(requests, fleet, table, decode_table)
    for place in np.unique(np.stack([served.engine, served.rank]), axis=1).T:
        own = (served.engine == place[0]) & (served.rank == place[1])
        assert (np.diff(served.scheduled[own]) >= 0).all()


def test_one_seat_of_fixed_steps_is_the_queue_m_d_1():
    rate, count = 70.0, 200_000
    arrival = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    ones = np.ones(count, int)
    served = serve(Requests(arrival, ones, ones), Fleet(Engine(seats=1)), constant(0.01))
    busy = rate * 0.01
    assert (served.scheduled - served.sent).mean() == pytest.approx(busy * 0.01 / (2 * (1 - busy)), rel=0.03)


@pytest.mark.parametrize(("users", "seats", "at_a_time"), [(4, 8, 4), (8, 2, 2)])
def test_a_closed_loop_is_bound_by_users_or_seats(users, seats, at_a_time):
    """Every request takes five steps of 0.1 s, and as many are served side by side as users or seats allow."""
    count = 40
    requests = Requests(np.zeros(count), np.full(count, 3), np.full(count, 5))
    served = serve(requests, Fleet(Engine(seats=seats), users=users), constant(0.1))
    assert served.finish.max() == pytest.approx(count / at_a_time * 0.5)
    np.testing.assert_allclose(served.finish - served.scheduled, 0.5)


def test_what_can_never_be_served_is_told_before():
    requests = requests_of((0, 4, 4), (0, 20, 3))
    with pytest.raises(InputError, match=r"engine\.longest is 22, but request 1 needs 23 tokens"):
        serve(requests, Fleet(Engine(longest=22)), SECOND)
    with pytest.raises(InputError, match=r"engine\.kv_blocks is 10, but request 1 needs 11 blocks"):
        serve(requests, Fleet(Engine(kv_blocks=10, block_tokens=2)), SECOND)
    assert serve(requests, Fleet(Engine(kv_blocks=11, block_tokens=2)), SECOND).finish.min() > 0
    with pytest.raises(InputError, match=r"engine\.kv_blocks is 12, but request 1 needs 13 blocks"):
        serve(requests, Fleet(Engine("sglang", kv_blocks=12, block_tokens=2)), SECOND)
    assert serve(requests, Fleet(Engine("sglang", kv_blocks=13, block_tokens=2)), SECOND).finish.min() > 0
    named = requests_of((0, 4, 4), names=[[1]])
    with pytest.raises(InputError, match=r"block_tokens is 3; expected a divisor of the 4"):
        serve(named, Fleet(Engine(kv_blocks=9, block_tokens=3, prefix_cache=True)), SECOND)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Engine(seats=0), r"engine\.seats is 0"),
        (lambda: Engine(prefix_cache=True), r"engine\.kv_blocks is not given"),
        (lambda: Fleet(Engine(), 0), r"fleet\.engines is 0"),
        (lambda: Fleet(Engine(), users=0), r"fleet\.users is 0"),
        (lambda: DecodePool(Engine(), 1.0, 0.0), r"decode\.bytes_per_s is 0"),
        (lambda: DecodePool(Engine(), 1.0, 1.0, engines=0), r"decode\.engines is 0"),
    ],
)
def test_settings_that_serve_nothing(make, told):
    with pytest.raises(InputError, match=told):
        make()


def test_a_run_that_does_not_go_on_has_what_a_whole_one_has_by_then(monkeypatch):
    monkeypatch.setattr("jaxmoe.serving.online.simulate.LOOK", 3)
    ended = 0
    for seed in range(20):
        requests, fleet, table, decode_table = drawn_scenario(seed)
        whole, looks = serve(requests, fleet, table, decode_table), []

        def goes_on(served: Served, looks: list[Served] = looks) -> bool:
            looks.append(served)
            return len(looks) < 3

        begun = serve(requests, fleet, table, decode_table, goes_on=goes_on)
        assert begun.steps is None
        for found in (begun, *looks):
            for name in ("sent", "first_token", "finish"):
                own, all_of_them = getattr(found, name), getattr(whole, name)
                assert (own[own >= 0] == all_of_them[own >= 0]).all()
        ended += (begun.finish < 0).any()
        if len(looks) < 3:
            assert (begun.finish == whole.finish).all()
    assert ended > 5


def test_steps_of_a_batch_of_them_are_those_of_each():
    table = drawn_scenario(3).table
    features = np.random.default_rng(0).uniform(0, 150, (5, 2, len(FEATURES)))
    features[2, :, [FEATURES.index(name) for name in ("tokens", "sequences", "routed")]] = 0
    each = [float(table.seconds(step)) for step in features]
    assert table.seconds(features).tolist() == each
    assert each[2] == 0
    assert min(each[:2] + each[3:]) > 0
