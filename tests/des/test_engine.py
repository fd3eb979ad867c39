"""The event loop on cases worked by hand, and against the plain reference on random graphs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.des import GraphBuilder, Run, simulate

from .reference import Task, build, bytes_over_links, run_reference


def run(graph: GraphBuilder, bandwidth: float | list[float], latency: float, links: int) -> Run:
    return simulate(graph.build(), np.broadcast_to(np.asarray(bandwidth, float), links), np.full(links, latency))


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


def test_nothing_to_do_takes_no_time():
    assert run(GraphBuilder(1, 1), 1.0, 1.0, 1).makespan == 0.0


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


@given(task_lists(), bandwidths, latencies, chunks)
def test_the_plain_reference_agrees_exactly(tasks, bandwidth, latency, chunk_bytes):
    graph = build(tasks, LINKS, NODES, chunk_bytes)
    result = simulate(graph, np.array(bandwidth), np.array(latency))
    start, finish, link_busy, node_busy = run_reference(tasks, bandwidth, latency, NODES, chunk_bytes)
    np.testing.assert_array_equal(result.start, start)
    np.testing.assert_array_equal(result.finish, finish)
    np.testing.assert_array_equal(result.link_busy, link_busy)
    np.testing.assert_array_equal(result.node_busy, node_busy)


@given(task_lists(), bandwidths, latencies, chunks)
def test_bytes_are_conserved_and_no_server_outruns_its_load(tasks, bandwidth, latency, chunk_bytes):
    result = simulate(build(tasks, LINKS, NODES, chunk_bytes), np.array(bandwidth), np.array(latency))
    np.testing.assert_allclose(result.link_busy * bandwidth, bytes_over_links(tasks, LINKS), rtol=1e-12)
    busiest = max(result.link_busy.max(), result.node_busy.max())
    assert result.makespan >= busiest * (1 - 1e-12)
    for number, task in enumerate(tasks):
        assert result.finish[number] >= result.start[number] >= result.finish[list(task.after)].max(initial=0.0)


def test_the_same_graph_runs_the_same_way_twice():
    rng = np.random.default_rng(0)
    graph = GraphBuilder(6, 0, chunk_bytes=3.0)
    for _ in range(200):
        graph.transfer(rng.integers(6, size=3).tolist(), float(rng.integers(1, 20)))
    built, bandwidth, latency = graph.build(), rng.uniform(1, 2, 6), rng.uniform(0, 1, 6)
    first, second = (simulate(built, bandwidth, latency) for _ in range(2))
    np.testing.assert_array_equal(first.finish, second.finish)
    np.testing.assert_array_equal(first.start, second.start)
    np.testing.assert_array_equal(first.link_busy, second.link_busy)
