"""Timelines of recorded runs: a 2x2 layer worked by hand, and what must hold for every run."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import full

from jaxmoe.des import (
    GraphBuilder,
    LayerDescription,
    fabric_of,
    record_layer,
    replay_layer,
    replay_traffic,
    simulate,
    timeline_events,
)
from jaxmoe.des.timeline import run_slices, server_rows
from jaxmoe.hardware import Mesh, clusters
from jaxmoe.hardware.networks import link_ends, num_links
from jaxmoe.placement.exchange import exchange_of

from .test_layer import BATCH, LAYER, SHAPE, SHARE, random_case

KEYS = {
    "M": {"name", "ph", "pid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ph", "ts", "pid", "args"},
}
ROUNDING = 2e-6  # µs: two ends of a slice, each to six decimals


def timeline_of(layer: LayerDescription, share, batch, shape):
    recorded = record_layer(layer, share, batch)
    return recorded.run, timeline_events(recorded.run, layer.fabric, link_ends(shape), recorded.stage)


def rows_of(events):
    """Name of the process and of the thread by (pid, tid)."""
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = [e for e in events if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): (process[e["pid"]], e["args"]["name"]) for e in threads}


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def row_slices(events):
    """The slices of every row, by the names of its process and thread."""
    rows = rows_of(events)
    found = {name: [] for name in rows.values()}
    for event in of_phase(events, "X"):
        found[rows[event["pid"], event["tid"]]].append(event)
    return found


def on_link(events, link):
    """(message, name, begin s, duration s, bytes) of every slice."""
    return [
        (e["args"]["message"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6, e["args"]["bytes"])
        for e in row_slices(events)["links", f"link {link}"]
    ]


@pytest.fixture(scope="module")
def hand():
    """Events of the layer worked by hand."""
    return timeline_of(LAYER, SHARE, BATCH, (2, 2))[1]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        # A message is two chunks of 4 B, each 2 s on a link and 0.25 s on the way. The numbers are those of
        # `test_a_sharded_layer_by_hand`: dispatch from 0, compute from 10.5, combine from 15.75.
        ("0 -> 1", [(0, "dispatch 0 -> 1", 0.0, 4.0, 8.0), (1, "dispatch 0 -> 3", 4.0, 4.0, 8.0)]),
        ("1 -> 3", [(1, "dispatch 0 -> 3", 6.25, 4.0, 8.0)]),
        ("2 -> 0", [(2, "dispatch 2 -> 0", 0.0, 4.0, 8.0)]),
        ("2 -> 3", [(3, "dispatch 2 -> 3", 0.0, 4.0, 8.0)]),
        ("1 -> 0", [(4, "combine 1 -> 0", 15.75, 4.0, 8.0), (5, "combine 3 -> 0", 19.75, 4.0, 8.0)]),
        ("3 -> 1", [(5, "combine 3 -> 0", 15.75, 4.0, 8.0)]),
        ("0 -> 2", [(6, "combine 0 -> 2", 15.75, 4.0, 8.0)]),
        ("3 -> 2", [(7, "combine 3 -> 2", 15.75, 4.0, 8.0)]),
    ],
)
def test_slices_of_a_link_by_hand(hand, link, expected):
    assert on_link(hand, link) == expected


@pytest.mark.parametrize(("node", "seconds"), [(0, 1.5), (1, 3.0), (2, 0.375), (3, 5.25)])
def test_what_a_node_computes_by_hand(hand, node, seconds):
    (event,) = row_slices(hand)[f"node {node}", "compute"]
    assert (event["name"], event["ts"], event["dur"]) == ("compute", 10.5e6, seconds * 1e6)
    assert event["args"] == {"stage": "compute"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Message and second. 0 > 3 waits behind 0 > 1; a message is there 0.25 s after its last link.
        (("node 0", "sends"), [(0, 0.0), (1, 4.0), (6, 15.75)]),
        (("node 1", "sends"), [(4, 15.75)]),
        (("node 2", "sends"), [(2, 0.0), (3, 0.0)]),
        (("node 3", "sends"), [(5, 15.75), (7, 15.75)]),
        (("node 0", "receives"), [(2, 4.25), (4, 20.0), (5, 24.0)]),
        (("node 1", "receives"), [(0, 4.25)]),
        (("node 2", "receives"), [(6, 20.0), (7, 20.0)]),
        (("node 3", "receives"), [(3, 4.25), (1, 10.5)]),
    ],
)
def test_marks_of_a_node_by_hand(hand, row, expected):
    marks = row_slices(hand)[row]
    assert [(mark["args"]["message"], mark["ts"] / 1e6) for mark in marks] == expected
    assert all(mark["dur"] == 0 and mark["args"]["bytes"] == 8 for mark in marks)


def test_the_arrow_of_a_message_by_hand(hand):
    rows = rows_of(hand)
    arrow = [event for event in hand if event.get("id") == 5]
    assert [(event["ph"], rows[event["pid"], event["tid"]], event["ts"] / 1e6) for event in arrow] == [
        ("s", ("node 3", "sends"), 15.75),
        ("t", ("links", "link 3 -> 1"), 15.75),
        ("t", ("links", "link 1 -> 0"), 19.75),
        ("f", ("node 0", "receives"), 24.0),
    ]
    assert arrow[-1]["bp"] == "e"


def test_details_of_a_message_by_hand(hand):
    (event,) = row_slices(hand)["links", "link 1 -> 3"]
    assert event["cat"] == "dispatch"
    assert event["args"] == {"bytes": 8.0, "source": 0, "destination": 3, "stage": "dispatch", "message": 1}


def test_counters_by_hand(hand):
    def levels(name):
        return [(e["ts"] / 1e6, *e["args"].values()) for e in of_phase(hand, "C") if e["name"] == name]

    # Links: 0>1, 2>0, 2>3 from 0 to 4, then 0>1 alone until 8, and 1>3 from 6.25 to 10.25; in combine four until
    # 19.75, then 1>0 until 23.75. A message is under way until it is there.
    assert levels("links") == [
        (0.0, 3), (4.0, 1), (6.25, 2), (8.0, 1), (10.25, 0), (15.75, 4), (19.75, 1), (23.75, 0),
    ]  # fmt: skip
    assert levels("messages") == [
        (0.0, 24), (4.0, 32), (4.25, 8), (10.5, 0), (15.75, 32), (20.0, 8), (24.0, 0),
    ]  # fmt: skip


def test_rows_are_links_and_then_nodes(hand):
    names = [*rows_of(hand).values()]
    assert names[:8] == [
        ("links", f"link {ends}")
        for ends in ("0 -> 2", "1 -> 3", "2 -> 0", "3 -> 1", "0 -> 1", "2 -> 3", "1 -> 0", "3 -> 2")
    ]
    assert names[8:11] == [("node 0", "compute"), ("node 0", "sends"), ("node 0", "receives")]
    assert len(names) == 8 + 4 * 3
    for what in ("process_sort_index", "thread_sort_index"):
        order = [event["args"]["sort_index"] for event in hand if event["name"] == what]
        assert order == [*range(len(order))]
    numbers = [*{pid for pid, _ in rows_of(hand)}, *(tid for _, tid in rows_of(hand))]
    assert len({*numbers}) == len(numbers)
    assert 0 not in numbers


def with_ports(layer: LayerDescription, rng, cut_through) -> LayerDescription:
    """The same layer on a mesh with ports, some of its links slow, and chunks that do not divide a message."""
    links, nodes = num_links(SHAPE), layer.num_nodes
    mesh = Mesh(
        jnp.asarray(rng.uniform(0.3, 3, links), jnp.float32),
        jnp.asarray(rng.uniform(0, 0.1, links), jnp.float32),
        shape=SHAPE,
        injection_bandwidth=jnp.asarray(rng.uniform(1, 2, nodes), jnp.float32),
        ejection_bandwidth=jnp.asarray(rng.uniform(1, 2, nodes), jnp.float32),
    )
    return replace(layer, fabric=fabric_of(mesh, 3.0, cut_through))


@given(
    seed=st.integers(0, 2**16),
    tokens=st.integers(1, 12),
    mode=st.sampled_from(["sharded", "replicated"]),
    ports=st.booleans(),
    cut_through=st.booleans(),
    exchange=st.sampled_from(
        ["lowest_host", "fewest_hops_split_tree", "reduce_scatter", "ring_both_ways", "rings_1x2"]
    ),
)
def test_what_holds_for_every_layer(seed, tokens, mode, ports, cut_through, exchange):
    layer, share, batch = random_case(seed, tokens=tokens)
    layer = replace(layer, mode=mode, exchange=exchange_of(exchange))
    if ports:
        layer = with_ports(layer, np.random.default_rng(seed), cut_through)
    run, events = timeline_of(layer, share, batch, SHAPE)
    assert run.makespan == pytest.approx(replay_layer(layer, share, batch).total_s, rel=1e-12)
    assert json.loads(json.dumps(events, allow_nan=False)) == events
    assert all(event.keys() == KEYS[event["ph"]] | (event.keys() & {"tid"}) for event in events)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    check_slices(events, run.makespan * 1e6)
    check_busy_times(events, run, layer)
    check_arrows(events)
    for name in ("links", "messages"):
        levels = [next(iter(event["args"].values())) for event in of_phase(events, "C") if event["name"] == name]
        assert min(levels, default=0) >= 0
        assert levels[-1:] in ([], [0])


def check_slices(events, makespan):
    for slices in row_slices(events).values():
        ends = [event["ts"] + event["dur"] for event in slices]
        assert all(event["dur"] >= 0 for event in slices)
        assert max(ends, default=0) <= makespan + ROUNDING
        for end, following in zip(ends, slices[1:], strict=False):
            assert end <= following["ts"] + ROUNDING


def check_busy_times(events, run, layer):
    """What rows show adds up to what the simulator counted: seconds of nodes, and bytes of links and ports."""
    rows = row_slices(events)
    carried = run.link_busy * layer.fabric.rate
    nodes = layer.num_nodes
    for server, row in enumerate(server_rows(layer.fabric, link_ends(SHAPE))):
        slices = rows["links" if row.process == 0 else f"node {row.process - 1}", row.name]
        if row.name == "compute":
            seconds = sum(event["dur"] for event in slices) / 1e6
            assert seconds == pytest.approx(run.node_busy[row.process - 1], abs=1e-11)
        else:
            assert sum(event["args"]["bytes"] for event in slices) == pytest.approx(carried[server], abs=0.05)
    assert sum(len(rows[f"node {node}", "sends"]) for node in range(nodes)) == len(of_phase(events, "s"))


def check_arrows(events):
    """Every message has one arrow, which starts, passes and ends on slices of this message, in order of time."""
    latest, arrows, bound = {}, {}, {}
    for event in events:
        if event["ph"] == "X":
            latest[event["pid"], event["tid"]] = event
        elif event["ph"] in "stf":
            # Viewers bind it to the slice that began last in its row, or to the one at its time: let both be the same.
            on = latest[event["pid"], event["tid"]]
            assert (on["ts"], on["args"]["message"]) == (event["ts"], event["id"])
            arrows.setdefault(event["id"], []).append(event)
            bound.setdefault(event["id"], []).append(on["args"])
    assert sorted(arrows) == [*range(len(of_phase(events, "s")))]
    rows = rows_of(events)
    for number, arrow in arrows.items():
        assert [event["ph"] for event in arrow] == ["s", *"t" * (len(arrow) - 2), "f"]
        ((source, destination),) = {(each["source"], each["destination"]) for each in bound[number]}
        assert rows[arrow[0]["pid"], arrow[0]["tid"]] == (f"node {source}", "sends")
        assert rows[arrow[-1]["pid"], arrow[-1]["tid"]] == (f"node {destination}", "receives")


MESH = Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2))


@pytest.mark.parametrize("order", ["staggered", "by_destination"])
@pytest.mark.parametrize("cut_through", [False, True])
def test_traffic_without_stages(order, cut_through):
    traffic = np.random.default_rng(0).integers(0, 30, (4, 4)) * (1 - np.eye(4))
    fabric = fabric_of(MESH, 4.0, cut_through)
    run = replay_traffic(fabric, traffic, order, record=True).run
    rows = row_slices(timeline_events(run, fabric, MESH.link_ends))
    seen = np.zeros((4, 4))
    for node in range(4):
        for mark in rows[f"node {node}", "receives"]:
            assert mark["args"]["stage"] == "transfer"
            seen[mark["args"]["source"], node] += mark["args"]["bytes"]
    np.testing.assert_array_equal(seen, traffic)


def test_a_run_of_any_tasks_without_stages():
    fabric = fabric_of(MESH, None)
    graph = GraphBuilder(8, 4)
    first = graph.compute(2, 3.0)
    graph.transfer(fabric.paths[2, 1], 6.0, after=[first])
    run = simulate(graph.build(), fabric.rate, fabric.latency, record=True)
    events = timeline_events(run, fabric, MESH.link_ends)
    assert [(e["name"], e["cat"], e["ts"]) for e in of_phase(events, "X")] == [
        ("compute", "compute", 0.0),
        ("transfer 2 -> 1", "transfer", 3e6),
        ("transfer 2 -> 1", "transfer", 3e6),
        ("transfer 2 -> 1", "transfer", 6.25e6),
        ("transfer 2 -> 1", "transfer", 9.5e6),
    ]


def test_chunks_of_a_message_are_told_apart_where_others_come_between():
    fabric = fabric_of(Mesh(full(4, 1.0), full(4, 0.0), shape=(1, 3)), chunk_bytes=2.0)
    ends = link_ends((1, 3))
    graph = GraphBuilder(4, 3, chunk_bytes=2.0)
    graph.transfer(fabric.paths[0, 2], 4.0)
    graph.transfer(fabric.paths[1, 2], 2.0, after=[graph.compute(1, 3.0)])
    run = simulate(graph.build(), fabric.rate, fabric.latency, record=True)
    # The first chunk of 0 > 2 is on link 1 > 2 from 2 to 4, then comes the message that is released at 3, and the
    # second chunk, there since 4, follows at 6.
    events = timeline_events(run, fabric, ends)
    assert [(message, begin, size) for message, _, begin, _, size in on_link(events, "1 -> 2")] == [
        (0, 2.0, 2.0), (1, 4.0, 2.0), (0, 6.0, 2.0),
    ]  # fmt: skip
    assert [(message, begin, size) for message, _, begin, _, size in on_link(events, "0 -> 1")] == [(0, 0.0, 4.0)]
    assert len(of_phase(events, "t")) == 3


def test_bytes_are_right_where_cut_through_holds_a_link_for_longer():
    bandwidth = jnp.asarray([4.0 if start == 1 else 1.0 for start in link_ends((1, 3))[:, 0]])
    fabric = fabric_of(Mesh(bandwidth, full(4, 0.0), shape=(1, 3)), 2.0, cut_through=True)
    traffic = np.zeros((3, 3))
    traffic[0, 2] = 6.0
    run = replay_traffic(fabric, traffic, record=True).run
    # The first link needs 6 s and the second, four times as fast, is held by the tails for as long.
    events = timeline_events(run, fabric, link_ends((1, 3)))
    assert on_link(events, "1 -> 2") == [(0, "transfer 0 -> 2", 0.0, 6.0, 6.0)]


@pytest.mark.parametrize(
    ("numbers", "ports"),
    [
        ({"injection_bandwidth": full(4, 4.0)}, ["injection port"]),
        ({"ejection_bandwidth": full(4, 4.0)}, ["ejection port"]),
        (
            {"injection_bandwidth": full(4, 4.0), "ejection_bandwidth": full(4, 4.0)},
            ["injection port", "ejection port"],
        ),
    ],
)
def test_ports_are_rows_of_their_nodes(numbers, ports):
    mesh = Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2), **numbers)
    fabric = fabric_of(mesh, 8.0)
    traffic = np.zeros((4, 4))
    traffic[0, 3] = 8.0
    rows = row_slices(timeline_events(replay_traffic(fabric, traffic, record=True).run, fabric, mesh.link_ends))
    assert [name for process, name in rows if process == "node 1"] == ["compute", "sends", "receives", *ports]
    for port in ports:
        busy = [process for (process, name), slices in rows.items() if name == port and slices]
        assert busy == ["node 0" if port == "injection port" else "node 3"]
        (event,) = rows[busy[0], port]
        assert (event["dur"], event["args"]["bytes"]) == (2e6, 8.0)


def test_latency_of_end_points_shows_in_the_receipt():
    mesh = Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2), endpoint_latency=7.0)
    fabric = fabric_of(mesh, None)
    traffic = np.zeros((4, 4))
    traffic[0, 1] = 8.0
    rows = row_slices(timeline_events(replay_traffic(fabric, traffic, record=True).run, fabric, mesh.link_ends))
    assert rows["node 1", "ejection port"] == []
    assert [event["ts"] for event in rows["node 1", "receives"]] == [11.25e6]


def test_switches_have_names():
    topology = clusters(2, 2, 1.0, 0.0, 1.0, 0.0)
    fabric = fabric_of(topology, None)
    run = replay_traffic(fabric, 1 - np.eye(4), record=True).run
    events = timeline_events(run, fabric, np.asarray(topology.link_ends))
    names = {name for process, name in rows_of(events).values() if process == "links"}
    vertices = {end for name in names for end in name.removeprefix("link ").split(" -> ")}
    assert vertices == {"0", "1", "2", "3", *(f"switch {number}" for number in range(len(vertices) - 4))}
    assert len(vertices) > 4
    assert {(e["args"]["source"], e["args"]["destination"]) for e in of_phase(events, "X")} == {
        (source, destination) for source in range(4) for destination in range(4) if source != destination
    }


@pytest.mark.parametrize("shape", [(2, 2), (1, 1)])
def test_a_run_in_which_nothing_moves(shape):
    links, nodes = num_links(shape), shape[0] * shape[1]
    fabric = fabric_of(Mesh(full(links, 1.0), full(links, 0.0), shape=shape), None)
    run = replay_traffic(fabric, np.zeros((nodes, nodes)), record=True).run
    events = timeline_events(run, fabric, link_ends(shape))
    assert {event["ph"] for event in events} == {"M"}
    assert len(run_slices(run, fabric).task) == 0


def test_what_does_not_belong_to_the_run_is_refused():
    fabric, ends = LAYER.fabric, link_ends((2, 2))
    recorded = record_layer(LAYER, SHARE, BATCH)
    with pytest.raises(ValueError, match="record=True"):
        timeline_events(replace(recorded.run, services=None), fabric, ends)
    with pytest.raises(ValueError, match=r"run has 8 .* fabric 14"):
        timeline_events(recorded.run, fabric_of(Mesh(full(14, 1.0), full(14, 1.0), shape=(2, 3)), None), ends)
    with pytest.raises(ValueError, match="ends of 7 links"):
        timeline_events(recorded.run, fabric, ends[:7])
    with pytest.raises(ValueError, match=r"1 stages for \d+ tasks"):
        timeline_events(recorded.run, fabric, ends, ["dispatch"])
