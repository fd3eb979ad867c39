"""Topics that drift and experts that are placed anew: by hand, what a plan sees, and what `jaxmoe serve` makes."""

import json
from dataclasses import replace

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from test_serve import scenario, serve, table
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.errors import InputError
from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.methods.moentwine.balancing import Eplb, ShadowSlots
from jaxmoe.placement.eplb import eplb
from jaxmoe.serving.gating import loads_of_layers
from jaxmoe.serving.online.rebalancing import Rebalancing, experts_moved, imbalance
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.online.topics import (
    drawn_topics,
    loads,
    made_up_topics,
    popularity,
    read_topics,
    tokens_of,
    windows_of,
)

__all__ = ["scenario"]  # a fixture
EXPERTS = "deployment={backend: sglang, data: 2, expert_ranks: 2, redundant_experts: 2, prompt_tokens: 128, " + (
    "output_tokens: 64}"
)
TOPICS = "serving.topics={count: 4, drift_s: 0.1, window_s: 0.05}"
MOVES = "serving.rebalance={method: eplb, every_s: 0.1, bandwidth_GB_per_s: 1}"
GIVEN = ("--set", EXPERTS, "--set", TOPICS)


def test_imbalance_by_hand():
    """Three quarters of the choices are on the first of two devices; a copy of expert 0 on the other evens them."""
    shares = np.array([[0.5, 0.25, 0.25, 0.0]])
    assert imbalance(shares, np.array([[0, 1, 2, 3]]), 2) == pytest.approx(1.5)
    assert imbalance(shares, np.array([[0, 1, 3, 0, 2, 3]]), 2) == pytest.approx(1.0)
    assert imbalance(shares, np.array([[0, 1, -1, 2, 3, -1]]), 2) == pytest.approx(1.5)  # two slots stay empty


def test_moves_by_hand():
    """Slots of a device may change places for nothing. Two experts come to device 1, both from device 0."""
    before = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    assert experts_moved(before, np.array([[1, 0, 2, 3], [0, 1, 3, 2]]), 2) == (0, 0)
    assert experts_moved(before, np.array([[2, 1, 0, 3], [0, 1, 1, 3]]), 2) == (3, 2)


def test_popularity_forgets_at_the_pace_that_is_asked():
    parts = popularity(4000, 13, 10.0, 120.0, 1.5, np.random.default_rng(0))
    np.testing.assert_allclose(parts.sum(axis=1), 1)
    log = np.log(parts)
    assert log.std(axis=1) == pytest.approx(1.5, rel=0.05)
    assert np.corrcoef(log[0], log[12])[0, 1] == pytest.approx(np.exp(-1), abs=0.05)


def test_tokens_are_counted_in_the_window_of_their_request():
    parts = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    requests = Requests(np.array([-10.0, -0.5, 0.0, 10.0, 19.0]), np.full(5, 3), np.arange(1, 6))
    window = windows_of(requests, 10.0, -10.0)
    topic = drawn_topics(window, parts, np.random.default_rng(0))
    tokens = tokens_of(replace(requests, topic=topic), window, 2, 3)
    np.testing.assert_array_equal(tokens[:2], [[4 + 5, 0], [0, 6]])
    assert tokens[2].sum() == 7 + 8


COUNTS = np.ones((2, 3, 4))
NO_TOPICS = {
    "keys": {"counts": COUNTS},
    "names": {"group_name": ["law"], "counts_by_group": COUNTS},
    "axes": {"group_name": ["law", "art"], "counts_by_group": COUNTS[0]},
    "empty": {"group_name": np.array([], str), "counts_by_group": COUNTS[:0]},
    "cut": None,
    "nothing": None,
    "array": None,
}


@pytest.mark.parametrize("case", NO_TOPICS)
def test_a_file_that_has_no_groups_is_told(tmp_path, case):
    path = tmp_path / "a.npz"
    np.savez(path, **(NO_TOPICS[case] or NO_TOPICS["keys"]))
    if case == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif case == "nothing":
        path.write_bytes(b"")
    elif case == "array":
        with path.open("wb") as file:
            np.save(file, COUNTS)
    with pytest.raises(InputError, match="cannot be read as loads by topic"):
        read_topics(path)


def test_empty_slots_serve_nothing():
    """A rank with an empty slot has the loads that it has without that slot."""
    shares = np.random.default_rng(0).dirichlet(np.ones(8), 3)
    held = np.tile(np.arange(8), (3, 1))
    with_room = np.tile([0, 1, 2, 3, -1, 4, 5, 6, 7, -1], (3, 1))
    np.testing.assert_array_equal(
        loads_of_layers(shares, with_room, 2, 2).logs, loads_of_layers(shares, held, 2, 2).logs
    )


@pytest.fixture
def rebalancing():
    """Two topics of six experts on two devices with a slot more each; the table of a window has its number."""
    shares = made_up_topics(2, 3, 6, 1.0, 0)
    start = np.tile([0, 1, 2, 0, 3, 4, 5, 3], (3, 1))
    made = []

    def steps(loads, held, window):
        made.append((loads, held, window))
        return StepTable(())

    own = Rebalancing(shares, start, 2, 10.0, steps, Eplb(), 20.0, expert_bytes=1e6, bytes_per_s=1e9, scale=2.0)
    return own, made


def test_a_placement_is_of_the_interval_before_it_and_moves_what_it_takes(rebalancing):
    own, made = rebalancing
    arrival = np.arange(50.0)
    requests = Requests(arrival, np.full(50, 90), np.full(50, 10), topic=(arrival >= 20).astype(int))
    planned = own.planned(requests, engines=2)
    assert [at for _, _, at in made] == [0, 1, 2, 3, 4]
    for at, (seen, held, _) in enumerate(made):  # topic 0 until 20 s, then topic 1
        np.testing.assert_allclose(seen, own.shares[int(at >= 2)])
        judged = [own.start, eplb(own.shares[0], 8, 2), eplb(own.shares[1], 8, 2)][at // 2]
        assert imbalance(seen, held, 2) == pytest.approx(imbalance(seen, judged, 2), rel=1e-5)
    assert [(change.at, change.engine) for change in planned.changes] == [
        (10.0 * at, e) for at in range(5) for e in (0, 1)
    ]
    assert [move.at_s for move in planned.moves] == [20.0, 40.0]
    for move, at in zip(planned.moves, (2, 4), strict=True):
        total, most = experts_moved(made[at - 1][1], made[at][1], 2)
        assert total > 0
        assert move.moved_bytes == pytest.approx(2 * total * 1e6)
        assert move.pause_s == pytest.approx(2 * most * 1e6 / 1e9)
        assert [change.pause for change in planned.changes if change.at == move.at_s] == [move.pause_s] * 2
    assert sum(change.pause > 0 for change in planned.changes) == 4
    last = planned.moves[1]  # made for topic 1, which goes on
    assert last.imbalance_after < last.imbalance_before


def test_without_an_interval_nothing_moves_and_windows_without_requests_have_no_table(rebalancing):
    own, made = rebalancing
    requests = Requests(np.array([0.0, 5.0, 35.0]), np.full(3, 10), np.full(3, 5), topic=np.array([0, 0, 1]))
    planned = replace(own, every_s=np.inf).planned(requests, engines=1)
    assert planned.moves == []
    assert [at for _, _, at in made] == [0, 3]
    assert all(held is own.start for _, held, _ in made)
    for topic, (seen, _, _) in enumerate(made):
        np.testing.assert_allclose(seen, own.shares[topic])
    assert [change.at for change in planned.changes] == [0.0, 30.0]


@pytest.mark.parametrize(("window", "every"), [(0.1, 0.3), (0.05, 0.35), (1.0, 3.0)])
def test_intervals_are_whole_numbers_of_windows_though_their_parts_are_not(rebalancing, window, every):
    own, _ = rebalancing
    arrival = (np.arange(16) + 0.5) * window
    requests = Requests(arrival, np.full(16, 10), np.full(16, 5), topic=np.arange(16) % 2)
    planned = replace(own, window_s=window, every_s=every).planned(requests, engines=1)
    count = round(every / window)
    assert [move.at_s for move in planned.moves] == pytest.approx(np.arange(count, 16, count) * window)


def test_after_an_interval_without_requests_experts_stay(rebalancing):
    own, _ = rebalancing
    requests = Requests(np.array([0.0, 45.0, 61.0]), np.full(3, 10), np.full(3, 5), topic=np.array([0, 1, 1]))
    planned = own.planned(requests, engines=1)  # nobody came from 20 to 40 s
    assert [move.at_s for move in planned.moves] == [60.0]


def test_loads_of_a_mixture_by_hand():
    shares = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    np.testing.assert_allclose(loads(np.array([30.0, 10.0]), shares), [[0.75, 0.25]])


def test_a_run_tells_its_moves_in_the_summary_the_table_the_timeline_and_the_page(scenario, tmp_path, monkeypatch):
    draw = np.zeros((8, 8, 3))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: plt.imsave(path, draw, format="png"))
    monkeypatch.setattr(RateTrials, "highest", lambda *_: None)  # which takes long, with tables for every rate
    done = serve(scenario, *GIVEN, "--set", MOVES, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["rebalancing"]
    assert told["moves"] == len(told["each"]) >= 2
    assert told["moved_bytes"] == pytest.approx(sum(move["moved_bytes"] for move in told["each"]))
    assert "times that experts were placed anew" in done.output
    steps, shown = table(tmp_path / "out" / "steps.csv"), json.loads((tmp_path / "out" / "timeline.json").read_text())
    events = [event for event in shown["traceEvents"] if event["name"] == "experts move"]
    assert events
    for event in events:
        own = (steps["engine"] == event["pid"]) & (steps["start_s"] >= event["args"]["at_s"])
        assert event["ts"] == pytest.approx(1e6 * steps["start_s"][own][0], rel=1e-6)
        assert steps["seconds"][own][0] > event["dur"] / 1e6 > 0  # the step waits for the weights
    page = CliRunner().invoke(app, ["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    assert "imbalance_after" in (tmp_path / "page.html").read_text()


def test_slower_links_make_the_same_moves_cost_more(scenario):
    fast, slow = (
        serving_of(load_scenario(scenario, [EXPERTS, TOPICS, MOVES.replace("GB_per_s: 1", f"GB_per_s: {rate}")]))
        for rate in (10, 0.1)
    )
    assert fast.identity != slow.identity
    assert fast.planned.imbalance == slow.planned.imbalance
    for one, other in zip(fast.planned.moves, slow.planned.moves, strict=True):
        assert other.pause_s == pytest.approx(100 * one.pause_s)
    assert slow.at()[1].finish.mean() > fast.at()[1].finish.mean()


def test_a_run_is_another_one_where_a_rule_has_other_hops_or_settings(rebalancing):
    own, _ = rebalancing
    near, far = (jnp.full((2, 2), hops) for hops in (1.0, 2.0))
    rules = [ShadowSlots(near, 2), ShadowSlots(far, 2), ShadowSlots(near, 1), ShadowSlots(near, 2, "coldest"), Eplb()]
    identities = [replace(own, rule=rule).identity for rule in rules]
    assert len({*identities}) == len(rules)
    assert replace(own, rule=ShadowSlots(near, 2)).identity == identities[0]


def test_moentwines_balancers_leave_native_experts_where_they_are(scenario):
    for method in ("greedy", "topology_aware"):
        moves = MOVES.replace("eplb", method)
        own = serving_of(load_scenario(scenario, [EXPERTS, TOPICS, moves])).rebalancing
        native = own.start.reshape(len(own.start), 2, 5)[:, :, :4]
        np.testing.assert_array_equal(native[0], [[0, 1, 2, 3], [4, 5, 6, 7]])
        placed = own.placed(own.shares[0], own.start).reshape(len(own.start), 2, 5)
        np.testing.assert_array_equal(placed[:, :, :4], native)
        assert imbalance(own.shares[0], placed.reshape(own.start.shape), 2) < imbalance(
            own.shares[0], np.tile(np.arange(8), (len(own.start), 1)), 2
        )


def test_experts_that_do_not_divide_leave_empty_slots_that_eplb_fills(scenario):
    """Seven experts in four slots on each of two ranks: the last slot is free, for a copy."""
    uneven = EXPERTS.replace("experts: 2", "experts: 1"), "model.num_experts=7"
    serving = serving_of(load_scenario(scenario, [*uneven, TOPICS, MOVES]))
    assert serving.rebalancing is not None
    for held in serving.rebalancing.start:
        assert {*held.tolist()} == {*range(7)}


REFUSED = {
    "users": (
        [TOPICS, "serving.arrivals={kind: users, users: 3}"],
        'serving.topics is "a mapping"; expected null where users send when they are answered',
    ),
    "no topics": ([MOVES], 'serving.rebalance is "a mapping"; expected null without topics'),
    "interval": ([TOPICS, MOVES.replace("0.1,", "0.12,")], "serving.rebalance.every_s is 0.12; expected a multiple of"),
    "ranks": ([TOPICS, MOVES], "deployment.expert_ranks is 1; expected 2 or more"),
    "no slots": (
        [EXPERTS.replace("redundant_experts: 2, ", ""), TOPICS, MOVES.replace("eplb", "greedy")],
        "serving.rebalance.method is greedy, which fills the slots of deployment.redundant_experts, but there are none",
    ),
    "uneven": (
        [EXPERTS.replace("experts: 2", "experts: 1"), "model.num_experts=7", TOPICS, MOVES.replace("eplb", "greedy")],
        "the 7 of the model do not divide over deployment.expert_ranks, 2. Take eplb",
    ),
    "file": ([EXPERTS, "serving.topics={path: none.npz}"], "none.npz: cannot be read as loads by topic"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_clear_error(scenario, tmp_path, case):
    given, said = REFUSED[case]
    done = serve(scenario, "--out", tmp_path / "out", *(f"--set={each}" for each in given))
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_loads_of_another_model_are_refused(scenario, tmp_path):
    np.savez(tmp_path / "loads.npz", group_name=["law/a", "art/b"], counts_by_group=np.ones((2, 3, 6), int))
    done = serve(scenario, "--out", tmp_path / "out", "--set", f"serving.topics.path={tmp_path / 'loads.npz'}")
    assert done.exit_code == 2, done.output
    assert "whose loads are of 6 experts; expected the 8 of the model" in done.output.replace("\n", " ")
