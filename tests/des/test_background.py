"""Tasks in the background: preemptive-resume by hand, and what must hold of any run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.des import GraphBuilder, SimulatedRun, simulate
from jaxmoe.des.fabric import Rows, rows_of


def add_behind(graph: GraphBuilder, path: list[int], size: float, after: tuple[int, ...] = ()) -> int:
    return int(graph.transfers(rows_of([path]), np.array([size]), rows_of([after]), background=True)[0])


def run(graph: GraphBuilder, links: int, latency: float = 0.0, **options: bool) -> SimulatedRun:
    return simulate(graph.build(), np.ones(links), np.full(links, latency), **options)


def pieces(result: SimulatedRun, task: int) -> list[tuple[float, float]]:
    services = result.services
    mine = services.task == task
    return list(zip(services.begin[mine].tolist(), services.end[mine].tolist(), strict=True))


@pytest.mark.parametrize("cut_through", [False, True])
def test_it_is_interrupted_and_goes_on_from_where_it_was(cut_through):
    graph = GraphBuilder(1, 1)
    weights = add_behind(graph, [0], 10.0)
    timer = graph.compute(0, 3.0)
    message = graph.transfer([0], 4.0, after=[timer])
    result = run(graph, 1, cut_through=cut_through, record=True)
    assert result.finish[message] == 7.0  # as if it had the link to itself
    assert result.finish[weights] == 14.0
    assert pieces(result, weights) == [(0.0, 3.0), (7.0, 14.0)]
    assert result.start[weights] == 0.0
    assert result.link_busy.tolist() == [14.0]


def test_it_waits_where_others_queue():
    graph = GraphBuilder(1, 0, chunk_bytes=1.0)
    first = graph.transfer([0], 3.0)
    weights = add_behind(graph, [0], 2.0)
    second = graph.transfer([0], 2.0)
    result = run(graph, 1)
    assert result.finish.tolist() == [3.0, 7.0, 5.0]
    assert (result.start[weights], result.start[second], first) == (5.0, 3.0, 0)


def test_the_background_is_served_in_order_and_stores_and_forwards():
    graph = GraphBuilder(2, 0, chunk_bytes=2.0)
    one = add_behind(graph, [0, 1], 4.0)
    other = add_behind(graph, [0], 1.0)
    after = add_behind(graph, [1], 1.0, (other,))
    result = run(graph, 2, latency=0.5, cut_through=True)
    # Chunks of `one` on link 0 in 0..2 and 2..4, on link 1 in 2.5..4.5 and 4.5..6.5; `other` in 4..5.
    assert result.finish[one] == 7.0
    assert result.finish[other] == 5.5
    assert result.finish[after] == 8.0  # 6.5..7.5 on link 1


def test_what_ends_when_another_comes_has_ended():
    graph = GraphBuilder(1, 1)
    weights = add_behind(graph, [0], 3.0)
    graph.transfer([0], 4.0, after=[graph.compute(0, 3.0)])
    assert run(graph, 1).finish[weights] == 3.0


def test_no_bytes_and_no_background():
    graph = GraphBuilder(1, 0)
    graph.transfer([0], 1.0)
    assert graph.build().background is None
    nothing = add_behind(graph, [0], 0.0)
    assert run(graph, 1).finish[nothing] == 1.0


def random_tasks(rng: np.random.Generator, links: int, nodes: int, count: int, weights: int) -> list[tuple]:
    """Tasks (kind, path or node, size, after); those after the first `count` in the background."""
    tasks: list[tuple] = []
    for index in range(count + weights):
        kind = "weights" if index >= count else rng.choice(["transfer", "compute"], p=[0.8, 0.2])
        after = rng.choice(index, size=min(index, int(rng.integers(0, 3))), replace=False) if index else []
        after = [int(task) for task in after if kind == "weights" or task < count]
        path = rng.permutation(links)[: rng.integers(1, links + 1)].tolist()
        tasks.append(
            (kind, path if kind != "compute" else int(rng.integers(nodes)), float(rng.integers(0, 9)) / 2, after)
        )
    return tasks


def built(tasks: list[tuple], links: int, nodes: int, behind: bool = True) -> GraphBuilder:
    graph = GraphBuilder(links, nodes, chunk_bytes=1.5)
    for kind, place, size, after in tasks:
        if kind == "compute":
            graph.compute(place, size, after)
        else:
            waits = Rows(np.array([0, len(after)]), np.asarray(after, np.int64))
            graph.transfers(rows_of([place]), np.array([size]), waits, background=behind and kind == "weights")
    return graph


@given(st.integers(0, 10**6), st.booleans())
def test_others_are_never_later_to_the_last_bit(seed, cut_through):
    rng = np.random.default_rng(seed)
    links, nodes, count = 4, 2, 12
    tasks = random_tasks(rng, links, nodes, count, 8)
    bandwidth, latency = rng.uniform(0.5, 2, links), rng.choice([0.0, 0.3], links)
    options = {"cut_through": cut_through, "record": True}
    alone = simulate(built(tasks[:count], links, nodes).build(), bandwidth, latency, **options)
    both = simulate(built(tasks, links, nodes).build(), bandwidth, latency, **options)
    np.testing.assert_array_equal(both.finish[:count], alone.finish)
    np.testing.assert_array_equal(both.start[:count], alone.start)
    # Work is conserved, and no server serves two at once.
    equal = simulate(built(tasks, links, nodes, behind=False).build(), bandwidth, latency)
    np.testing.assert_allclose(both.link_busy, equal.link_busy, rtol=1e-12)
    services = both.services
    lasting = services.end - services.begin
    for server in range(links) if not cut_through else []:
        mine = np.flatnonzero(services.server == server)
        order = mine[np.argsort(services.begin[mine], kind="stable")]
        np.testing.assert_allclose(lasting[mine].sum(), both.link_busy[server], rtol=1e-9)
        assert (services.begin[order][1:] >= services.end[order][:-1] - 1e-12).all()


@given(st.integers(0, 10**6))
def test_one_link_serves_the_background_whenever_it_is_free(seed):
    """Against the gaps between what others do: it is done when they add up to its work."""
    rng = np.random.default_rng(seed)
    graph = GraphBuilder(1, 1)
    timers = [graph.compute(0, float(size)) for size in rng.integers(1, 6, 6)]
    for timer in timers:
        graph.transfer([0], float(rng.integers(0, 4)), after=[timer])
    work = float(rng.integers(1, 12))
    weights = add_behind(graph, [0], work)
    result = run(graph, 1, record=True)
    services = result.services
    on_link = (services.server == 0) & (services.task != weights)
    regular = zip(services.begin[on_link].tolist(), services.end[on_link].tolist(), strict=True)
    now, left = 0.0, work
    for begin, end in sorted(regular):
        idle = max(begin - now, 0.0)
        if left <= idle:
            break
        left, now = left - idle, max(now, end)
    assert result.finish[weights] == pytest.approx(now + left, rel=1e-12)
