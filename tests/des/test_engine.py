"""The event loop on cases worked by hand, and against the plain reference on random graphs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.des import GraphBuilder, SimulatedRun, simulate
from jaxmoe.des.event_loop import ServiceRecord

from .reference import Task, build, bytes_over_links, run_reference


def run(
    graph: GraphBuilder, bandwidth: float | list[float], latency: float, links: int, **options: bool
) -> SimulatedRun:
    bandwidths = np.broadcast_to(np.asarray(bandwidth, float), links)
    return simulate(graph.build(), bandwidths, np.full(links, latency), **options)


def rows(services: ServiceRecord | None) -> list[tuple]:
    """(task, server, chunk, begin, end) of every service."""
    assert services is not None
    columns = (services.task, services.server, services.chunk, services.begin, services.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("size", [8.0, 10.0])  # in whole chunks; with a shorter last one
def test_a_single_flow(size):
    graph = GraphBuilder(3, 0, chunk_bytes=4.0)
    graph.transfer([0, 1, 2], size)
    result = run(graph, 2.0, 0.5, 3)
    # bytes / bandwidth + (hops - 1) * chunk / bandwidth + hops * latency. The shorter last chunk is held up
    # behind a full one on every link, so the formula holds for it as well.
    assert result.makespan == size / 2 + 2 * 4 / 2 + 3 * 0.5
    np.testing.assert_array_equal(result.link_busy, [size / 2] * 3)


def test_a_slow_link_sets_the_pace():
    graph = GraphBuilder(2, 0, chunk_bytes=2.0)
    graph.transfer([0, 1], 6.0)
    # Link 1 has the first chunk at 2/4 = 0.5 and then needs 6/1 s.
    assert run(graph, [4.0, 1.0], 0.0, 2).makespan == 6.5


def test_two_flows_share_a_link():
    graph = GraphBuilder(1, 0, chunk_bytes=2.0)
    graph.transfer([0], 4.0)
    graph.transfer([0], 6.0)
    result = run(graph, 2.0, 0.25, 1)
    # All chunks stand at the link at 0, in task order: 4 B in 0..2, then 6 B in 2..5, each 0.25 later at the end.
    assert result.start.tolist() == [0.0, 2.0]
    assert result.finish.tolist() == [2.25, 5.25]
    assert result.link_busy.tolist() == [5.0]


def test_a_queue_is_in_order_of_arrival():
    graph = GraphBuilder(2, 1, chunk_bytes=2.0)
    through = graph.transfer([0, 1], 4.0)
    timer = graph.compute(0, 3.0)
    late = graph.transfer([1], 6.0, after=[timer])
    result = run(graph, 1.0, 0.0, 2)
    # Link 0 serves the chunks of `through` in 0..2 and 2..4, so they reach link 1 at 2 and 4. The three chunks
    # of `late` reach it at 3. Link 1: through 2..4, late 4..6, 6..8, 8..10, through 10..12.
    assert result.finish[through] == 12.0
    assert result.start[late] == 4.0
    assert result.finish[late] == 10.0
    assert result.link_busy.tolist() == [4.0, 10.0]


def test_of_simultaneous_arrivals_the_earlier_task_goes_first():
    graph = GraphBuilder(3, 0, chunk_bytes=2.0)
    graph.transfer([0, 2], 4.0)
    graph.transfer([1, 2], 4.0)
    # Chunks of both reach link 2 at 2 and at 4. Link 2: a 2..4, b 4..6, a 6..8, b 8..10.
    assert run(graph, 1.0, 0.0, 3).finish.tolist() == [8.0, 10.0]


def test_completions_go_before_simultaneous_arrivals():
    graph = GraphBuilder(2, 1)
    timer = graph.compute(0, 2.0)
    released = graph.transfer([1], 3.0, after=[timer])
    through = graph.transfer([0, 1], 2.0)
    result = run(graph, 1.0, 0.0, 2)
    # At 2 the timer ends and `through` reaches link 1. The completion is taken first, so `released`, an earlier
    # task, is in the queue of link 1 when the arrivals at 2 are taken in task order: 2..5, then 5..7.
    assert result.finish[released] == 5.0
    assert result.finish[through] == 7.0


def test_a_released_task_does_not_overtake_an_earlier_one():
    graph = GraphBuilder(2, 1)
    through = graph.transfer([0, 1], 2.0)
    timer = graph.compute(0, 2.0)
    released = graph.transfer([1], 3.0, after=[timer])
    result = run(graph, 1.0, 0.0, 2)
    # As above, but now `through` is the earlier task: 2..4, then 4..7.
    assert result.finish[through] == 4.0
    assert result.finish[released] == 7.0


def test_computations_queue_at_their_node():
    graph = GraphBuilder(0, 2)
    for node, seconds in ((0, 2.0), (0, 3.0), (1, 4.0)):
        graph.compute(node, seconds)
    result = run(graph, [], 0.0, 0)
    assert result.start.tolist() == [0.0, 2.0, 0.0]
    assert result.finish.tolist() == [2.0, 5.0, 4.0]
    assert result.node_busy.tolist() == [5.0, 4.0]


def test_barriers_and_local_deliveries_take_no_time():
    graph = GraphBuilder(1, 1)
    work = graph.compute(0, 2.0)
    local = graph.transfer([], 100.0, after=[work])
    join = graph.barrier([work, local])
    graph.transfer([0], 3.0, after=[join])
    result = run(graph, 1.0, 0.0, 1)
    assert result.start.tolist() == [0.0, 2.0, 2.0, 2.0]
    assert result.finish.tolist() == [2.0, 2.0, 2.0, 5.0]


def test_an_empty_message_takes_only_latency():
    graph = GraphBuilder(2, 0, chunk_bytes=4.0)
    graph.transfer([0, 1], 0.0)
    assert run(graph, 2.0, 0.5, 2).makespan == 1.0


def test_an_empty_message_may_come_before_what_left_the_link_as_late():
    graph = GraphBuilder(2, 1)
    timer = graph.compute(0, 1.0)
    empty = graph.transfer([0, 1], 0.0, after=[timer])
    large = graph.transfer([0, 1], 2.0)
    result = run(graph, 1.0, 0.0, 2)
    # The empty one waits from 1 to 2 for the large one on link 0. Both reach link 1 at 2, it as the earlier task.
    assert result.finish[empty] == 2.0
    assert result.finish[large] == 4.0


def test_nothing_to_do_takes_no_time():
    assert run(GraphBuilder(1, 1), 1.0, 1.0, 1).makespan == 0.0


@pytest.mark.parametrize("chunk_bytes", [None, 4.0, 3.0])
def test_cut_through_passes_every_link_at_once(chunk_bytes):
    graph = GraphBuilder(3, 0, chunk_bytes)
    graph.transfer([0, 1, 2], 8.0)
    result = run(graph, 2.0, 0.5, 3, cut_through=True)
    # However the message is cut: bytes / bandwidth once, and the latency of every hop.
    assert result.makespan == 8 / 2 + 3 * 0.5
    assert result.link_busy.tolist() == [4.0] * 3


def test_a_fast_link_after_a_slow_one_is_held_until_the_tail_is_there():
    graph = GraphBuilder(2, 1)
    timer = graph.compute(0, 1.0)
    through = graph.transfer([0, 1], 8.0)
    late = graph.transfer([1], 4.0, after=[timer])
    result = run(graph, [1.0, 4.0], 0.5, 2, cut_through=True, record=True)
    # Link 0 sends 0..8. The head is at link 1 at 0.5 and the tail at 8.5, though 8 B take link 1 only 2 s.
    # `late` stands at link 1 from 1 on and has it in 8.5..9.5.
    assert rows(result.services) == [
        (timer, 2, 0, 0.0, 1.0),
        (through, 0, 0, 0.0, 8.0),
        (through, 1, 0, 0.5, 8.5),
        (late, 1, 0, 8.5, 9.5),
    ]
    assert result.finish.tolist() == [1.0, 9.0, 10.0]
    # Busy is what the link carries over its bandwidth: 2 s and 1 s of the 9 s for which it is held.
    assert result.link_busy.tolist() == [8.0, 3.0]


@pytest.mark.parametrize("chunk_bytes", [None, 4.0])
def test_a_slow_link_after_a_fast_one_sets_the_pace_of_cut_through(chunk_bytes):
    graph = GraphBuilder(2, 0, chunk_bytes)
    graph.transfer([0, 1], 8.0)
    result = run(graph, [4.0, 1.0], 0.5, 2, cut_through=True, record=True)
    # Link 1 has the head at 0.5 and needs 8/1 s. In two chunks link 0 is free to send the second at 1: it waits
    # for link 1 until 4.5.
    assert result.makespan == 0.5 + 8 + 0.5
    whole = [(0, 0, 0, 0.0, 2.0), (0, 1, 0, 0.5, 8.5)]
    halves = [(0, 0, 0, 0.0, 1.0), (0, 0, 1, 1.0, 2.0), (0, 1, 0, 0.5, 4.5), (0, 1, 1, 4.5, 8.5)]
    assert rows(result.services) == (whole if chunk_bytes is None else halves)


def test_two_flows_cut_through_to_a_shared_link():
    graph = GraphBuilder(3, 0, chunk_bytes=2.0)
    graph.transfer([0, 2], 4.0)
    graph.transfer([1, 2], 4.0)
    result = run(graph, 1.0, 0.0, 3, cut_through=True)
    # The heads of both reach link 2 at 0, those of the second chunks at 2. Link 2: a 0..2, b 2..4, a 4..6,
    # b 6..8; stored and forwarded this is 2 s later.
    assert result.finish.tolist() == [6.0, 8.0]
    assert result.link_busy.tolist() == [4.0, 4.0, 8.0]


def test_a_barrier_waits_for_tails():
    graph = GraphBuilder(2, 0)
    sent = graph.transfer([0, 1], 4.0)
    graph.transfer([1], 2.0, after=[graph.barrier([sent])])
    # 4 s and two hops, then 2 s and one.
    assert run(graph, 1.0, 0.25, 2, cut_through=True).makespan == 4.5 + 2.25


def test_services_are_recorded_where_wanted():
    graph = GraphBuilder(2, 1, chunk_bytes=2.0)
    sent = graph.transfer([0, 1], 3.0)
    graph.compute(0, 5.0, after=[graph.barrier([sent])])
    assert run(graph, 1.0, 0.25, 2).services is None
    result = run(graph, 1.0, 0.25, 2, record=True)
    # In order of arrival: the second chunk stands at link 0 at 0, before the first is at link 1 at 2.25. Node 0
    # is server 2.
    assert rows(result.services) == [
        (0, 0, 0, 0.0, 2.0),
        (0, 0, 1, 2.0, 3.0),
        (0, 1, 0, 2.25, 4.25),
        (0, 1, 1, 4.25, 5.25),
        (2, 2, 0, 5.5, 10.5),
    ]
    assert rows(run(GraphBuilder(2, 1), 1.0, 0.0, 2, record=True).services) == []


@pytest.mark.parametrize(("bandwidth", "latency"), [([0.0], [0.0]), ([1.0], [-1.0]), ([1.0, 1.0], [0.0, 0.0])])
def test_impossible_links_are_refused(bandwidth, latency):
    with pytest.raises(ValueError, match="bandwidth"):
        simulate(GraphBuilder(1, 0).build(), np.array(bandwidth), np.array(latency))


LINKS, NODES = 4, 2


@st.composite
def task_lists(draw):
    """Tasks with coarse sizes, so that many events fall on the same instant."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 14))):
        after = tuple(draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True))) if number else ()
        size = float(draw(st.integers(0, 8)))
        kind = draw(st.sampled_from(["transfer", "transfer", "transfer", "compute", "barrier"]))
        if kind == "transfer":
            path = draw(st.lists(st.integers(0, LINKS - 1), min_size=1, max_size=3))
            tasks.append(Task(size, path=tuple(path), after=after))
        elif kind == "compute":
            tasks.append(Task(size, node=draw(st.integers(0, NODES - 1)), after=after))
        else:
            tasks.append(Task(after=after))
    return tasks


per_link = {"min_size": LINKS, "max_size": LINKS}
bandwidths = st.lists(st.sampled_from([0.7, 1.0, 2.0, 4.0]), **per_link)
latencies = st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), **per_link)
chunks = st.sampled_from([1.0, 2.0, 3.0, 100.0])
switching = pytest.mark.parametrize("cut_through", [False, True], ids=["stored", "cut_through"])


@switching
@given(tasks=task_lists(), bandwidth=bandwidths, latency=latencies, chunk_bytes=chunks)
def test_the_plain_reference_agrees_exactly(cut_through, tasks, bandwidth, latency, chunk_bytes):
    graph = build(tasks, LINKS, NODES, chunk_bytes)
    result = simulate(graph, np.array(bandwidth), np.array(latency), cut_through=cut_through, record=True)
    expected = run_reference(tasks, bandwidth, latency, NODES, chunk_bytes, cut_through)
    np.testing.assert_array_equal(result.start, expected.start)
    np.testing.assert_array_equal(result.finish, expected.finish)
    np.testing.assert_array_equal(result.link_busy, expected.link_busy)
    np.testing.assert_array_equal(result.node_busy, expected.node_busy)
    assert rows(result.services) == expected.services


@switching
@given(tasks=task_lists(), bandwidth=bandwidths, latency=latencies, chunk_bytes=chunks)
def test_a_record_changes_nothing(cut_through, tasks, bandwidth, latency, chunk_bytes):
    graph = build(tasks, LINKS, NODES, chunk_bytes)
    plain, recorded = (
        simulate(graph, np.array(bandwidth), np.array(latency), cut_through=cut_through, record=record)
        for record in (False, True)
    )
    np.testing.assert_array_equal(recorded.start, plain.start)
    np.testing.assert_array_equal(recorded.finish, plain.finish)
    np.testing.assert_array_equal(recorded.link_busy, plain.link_busy)
    np.testing.assert_array_equal(recorded.node_busy, plain.node_busy)


@switching
@given(tasks=task_lists(), bandwidth=bandwidths, latency=latencies, chunk_bytes=chunks)
def test_services_do_not_overlap_and_make_up_the_busy_time(cut_through, tasks, bandwidth, latency, chunk_bytes):
    graph = build(tasks, LINKS, NODES, chunk_bytes)
    result = simulate(graph, np.array(bandwidth), np.array(latency), cut_through=cut_through, record=True)
    services, busy = result.services, np.concatenate([result.link_busy, result.node_busy])
    assert len(services.task) == graph.chunk_hops
    for server in range(LINKS + NODES):
        begin, end = services.begin[services.server == server], services.end[services.server == server]
        assert (begin[1:] >= end[:-1]).all()
        held = (end - begin).sum()
        # Times are rounded, and `end - begin` loses digits with them: 1e-12 of the run, not of the service.
        assert held >= busy[server] - 1e-12 * result.makespan
        if not cut_through or len(set(bandwidth)) == 1:
            np.testing.assert_allclose(held, busy[server], rtol=0, atol=1e-12 * result.makespan)


@given(st.permutations(range(LINKS)), st.integers(1, LINKS), st.integers(0, 8), bandwidths, latencies, chunks)
def test_one_flow_cuts_through_at_the_pace_of_its_slowest_link(order, hops, size, bandwidth, latency, chunk_bytes):
    path = order[:hops]
    graph = build([Task(float(size), path=tuple(path))], LINKS, NODES, chunk_bytes)
    bandwidth, latency = np.array(bandwidth), np.array(latency)
    cut = simulate(graph, bandwidth, latency, cut_through=True)
    np.testing.assert_allclose(cut.makespan, latency[path].sum() + size / bandwidth[path].min(), rtol=1e-12)
    assert cut.makespan <= simulate(graph, bandwidth, latency).makespan


@switching
@given(tasks=task_lists(), bandwidth=bandwidths, latency=latencies, chunk_bytes=chunks)
def test_bytes_are_conserved_and_no_server_outruns_its_load(cut_through, tasks, bandwidth, latency, chunk_bytes):
    graph = build(tasks, LINKS, NODES, chunk_bytes)
    result = simulate(graph, np.array(bandwidth), np.array(latency), cut_through=cut_through)
    np.testing.assert_allclose(result.link_busy * bandwidth, bytes_over_links(tasks, LINKS), rtol=1e-12)
    busiest = max(result.link_busy.max(), result.node_busy.max())
    assert result.makespan >= busiest * (1 - 1e-12)
    for number, task in enumerate(tasks):
        assert result.finish[number] >= result.start[number] >= result.finish[list(task.after)].max(initial=0.0)


@switching
def test_the_same_graph_runs_the_same_way_twice(cut_through):
    rng = np.random.default_rng(0)
    graph = GraphBuilder(6, 0, chunk_bytes=3.0)
    for _ in range(200):
        graph.transfer(rng.integers(6, size=3).tolist(), float(rng.integers(1, 20)))
    built, bandwidth, latency = graph.build(), rng.uniform(1, 2, 6), rng.uniform(0, 1, 6)
    first, second = (simulate(built, bandwidth, latency, cut_through=cut_through) for _ in range(2))
    np.testing.assert_array_equal(first.finish, second.finish)
    np.testing.assert_array_equal(first.start, second.start)
    np.testing.assert_array_equal(first.link_busy, second.link_busy)
