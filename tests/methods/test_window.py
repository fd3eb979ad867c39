"""How many broadcasts fit into a window: by hand, and against Eq. 17 in a loop."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import floats, full

from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import HIDDEN
from jaxmoe.hardware import Die, Machine, Mesh
from jaxmoe.methods import FixedAllowance, WindowAllowance, experts_in_window
from jaxmoe.methods.hd_moe import busiest_link
from jaxmoe.network import ChunkedBroadcast

fitting = eqx.filter_jit(experts_in_window)


def test_a_window_by_hand():
    # Eq. 17 without latency: 30 elements at 2 s each, 60 s an expert.
    broadcast = ChunkedBroadcast(alpha=0.0, beta=2.0, nodes=16.0, hidden=5.0, intermediate=6.0)
    windows = floats([[0.0, 59.0, 60.0], [119.0, 121.0, 1e9]])
    assert fitting(broadcast, windows, 4).tolist() == [[0, 0, 1], [1, 2, 4]]
    # With a latency of 1 s: 60 k + 2 x 4 + 2 sqrt(2 x 4 x 2 k x 30) = 60 k + 8 + 43.82 sqrt(k): 111.8 and 189.97.
    slow = ChunkedBroadcast(alpha=1.0, beta=2.0, nodes=16.0, hidden=5.0, intermediate=6.0)
    assert fitting(slow, floats([111.0, 112.0, 189.0, 190.0]), 4).tolist() == [0, 1, 1, 2]
    assert int(fitting(slow, jnp.asarray(1e9), 0)) == 0


@given(
    st.floats(1e-8, 1e-5),
    st.floats(1e-12, 1e-9),
    st.sampled_from([4.0, 32.0]),
    st.lists(st.floats(1e-5, 1e-1), min_size=3, max_size=3),
)
def test_more_time_is_room_for_more(alpha, beta, nodes, windows):
    broadcast = ChunkedBroadcast(alpha=alpha, beta=beta, nodes=nodes, hidden=2048.0, intermediate=1408.0)
    found = fitting(broadcast, jnp.sort(jnp.asarray(windows)), 6).tolist()
    assert found == sorted(found)
    for window, k in zip(sorted(windows), found, strict=True):

        def seconds(count):
            return float(ChunkedBroadcast(alpha, beta, nodes, 2048.0, 1408.0, count).least_time())

        assert k == 0 or seconds(float(k)) <= window * (1 + 1e-5)
        assert k == 6 or seconds(k + 1.0) >= window * (1 - 1e-5)


def test_windows_may_differ_by_broadcast_as_well():
    speeds = floats([2.0, 1.0])
    broadcasts = eqx.filter_vmap(lambda beta: ChunkedBroadcast(0.0, beta, 16.0, 5.0, 6.0))(speeds)
    found = eqx.filter_vmap(lambda broadcast: experts_in_window(broadcast, jnp.asarray(100.0), 8))(broadcasts)
    np.testing.assert_array_equal(found, [1, 3])


def test_the_window_of_a_layer_is_the_layer_before():
    # 30 elements of 4 B over the slowest link, 2 B/s: 60 s an expert. The first layer sees the last one.
    mesh = Mesh(floats([2.0, 8.0]), full(2, 0.0), shape=(1, 2))
    machine = Machine(mesh, Die(full(2, 1.0)))
    last = LayerTime({}, {}, floats([60.0, 59.0, 200.0]))
    allowance = WindowAllowance(*(jnp.asarray(float(number)) for number in (5, 6, 4)))
    assert allowance(machine, last, 2).tolist() == [2, 1, 0]
    assert FixedAllowance(jnp.asarray(5))(machine, last, 2).tolist() == [2, 2, 2]
    assert FixedAllowance(jnp.array([0, 1, 2]))(machine, last, 2).tolist() == [0, 1, 2]


def test_attention_makes_the_window_longer_and_a_busy_link_makes_it_shorter():
    # 60 s an expert again. The layer before took 60 s with its experts alone and 65 s more for attention: 125 s, in
    # which the busiest link served 10 s, of the stages that count.
    mesh = Mesh(floats([2.0, 8.0]), full(2, 0.0), shape=(1, 2))
    machine = Machine(mesh, Die(full(2, 1.0)))
    busy = {"dispatch": {"link": floats([[4.0, 1.0]])}, "combine": {"link": floats([[6.0, 2.0]])}}
    busy |= {"movement": {"link": floats([[50.0, 50.0]])}, "compute": {"node": full((1, 2), 99.0)}}
    blocks = (("experts", ("dispatch", "compute", "combine")), (HIDDEN, ("movement",)))
    last = LayerTime({}, busy, floats([60.0]), blocks=blocks)
    assert float(busiest_link(last)[0]) == 10
    sizes = [jnp.asarray(float(number)) for number in (5, 6, 4)]

    def fits(attention: float, idle: bool) -> int:
        return int(WindowAllowance(*sizes, attention=attention, idle=idle)(machine, last, 4)[0])

    assert fits(0.0, False) == 1
    assert fits(65.0, False) == 2  # 125 s
    assert fits(65.0, True) == 1  # 115 s
    assert fits(70.0, True) == 2  # 120 s
    nothing = LayerTime({}, {}, floats([0.0]))  # before the first step
    assert WindowAllowance(*sizes, attention=200.0)(machine, nothing, 4).tolist() == [0]
