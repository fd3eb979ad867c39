"""Tasks: how messages are cut, and what a builder refuses."""

import numpy as np
import pytest

from jaxmoe.des import GraphBuilder


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "count", "chunk", "last"),
    [
        (8.0, 4.0, 2, 4.0, 4.0),  # evenly
        (10.0, 4.0, 3, 4.0, 2.0),  # the last is shorter
        (3.0, 4.0, 1, 3.0, 3.0),  # shorter than a chunk
        (10.0, None, 1, 10.0, 10.0),
        (10.0, 0.0, 1, 10.0, 10.0),
        (10.0, -1.0, 1, 10.0, 10.0),
        (0.0, 4.0, 1, 0.0, 0.0),  # an empty message still travels
    ],
)
def test_messages_are_cut_in_chunks(size, chunk_bytes, count, chunk, last):
    graph = GraphBuilder(1, 1, chunk_bytes)
    graph.transfer([0], size)
    built = graph.build()
    assert (built.chunks[0], built.chunk_size[0], built.last_size[0]) == (count, chunk, last)


def test_computations_are_not_cut():
    graph = GraphBuilder(1, 1, chunk_bytes=1.0)
    graph.compute(0, 10.0)
    assert graph.build().chunks.tolist() == [1]


def test_paths_and_successors_lie_flat():
    graph = GraphBuilder(num_links=4, num_nodes=2, chunk_bytes=1.0)
    first = graph.transfer([0, 3], 2.0)
    second = graph.compute(1, 1.0)
    join = graph.barrier([first, second])
    graph.transfer([2], 1.0, after=[first, join])
    built = graph.build()
    # Node 1 is server 4 + 1.
    assert built.path.tolist() == [0, 3, 5, 2]
    assert built.path_start.tolist() == [0, 2, 3, 3, 4]
    assert built.predecessors.tolist() == [0, 0, 2, 2]
    # 0 is followed by 2 and 3, 1 by 2, 2 by 3.
    assert built.successor.tolist() == [2, 3, 2, 3]
    assert built.successor_start.tolist() == [0, 2, 3, 4, 4]
    # 2 chunks x 2 hops + 1 computation + 1 chunk.
    assert built.chunk_hops == 6
    assert built.num_tasks == 4


def test_an_empty_graph_can_be_built():
    built = GraphBuilder(2, 2).build()
    assert built.num_tasks == 0
    np.testing.assert_array_equal(built.path_start, [0])


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda graph: graph.transfer([2], 1.0), "leaves the links"),
        (lambda graph: graph.transfer([-1], 1.0), "leaves the links"),
        (lambda graph: graph.compute(3, 1.0), "not one of the nodes"),
        (lambda graph: graph.transfer([0], -1.0), "not negative"),
        (lambda graph: graph.compute(0, float("nan")), "not negative"),
        (lambda graph: graph.compute(0, float("inf")), "finite"),
        (lambda graph: graph.barrier([0]), "added before"),
        (lambda graph: graph.transfer([0], 1.0, after=[-1]), "added before"),
    ],
)
def test_a_wrong_task_is_refused(add, message):
    graph = GraphBuilder(2, 3)
    with pytest.raises(ValueError, match=message):
        add(graph), graph.build()
