"""Pictures of networks of any form: what is drawn where, with and without loads."""

from functools import partial

import numpy as np
import pytest
from matplotlib.image import imread

from jaxmoe.hardware import clusters, fully_connected, ring, switch, torus
from jaxmoe.report import plot_network, plot_traffic, style
from jaxmoe.report.network import _spread
from jaxmoe.report.timeline import arrows, bends

NETWORKS = {
    "torus": partial(torus, (3, 4)),
    "ring": partial(ring, 7),
    "ring of two": partial(ring, 2),
    "switch": partial(switch, 6),
    "fully connected": partial(fully_connected, 5),
    "clusters": partial(clusters, 3, 4, uplink_bandwidth=1.0, uplink_latency=0.0, spines=2),
    "large": partial(ring, 200),
}
rng = np.random.default_rng(0)


def colours_in(path):
    pixels = imread(path)[:, :, :3]
    return len(np.unique((pixels[::3, ::3] * 255).astype(int).reshape(-1, 3), axis=0))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", [*[*NETWORKS][:-1], pytest.param("large", marks=pytest.mark.slow)])
def test_every_form_is_drawn_with_and_without_loads(tmp_path, name, loaded):
    network, path = NETWORKS[name](bandwidth=1.0, latency=0.0), tmp_path / "figure.png"
    nodes = network.num_nodes
    values = (rng.random(network.num_links) * 1e6, rng.random(nodes) * 1e6) if loaded else ()
    plot_network(path, network.link_ends, network.positions(), *values, title=name, num_nodes=nodes)
    height, width = imread(path).shape[:2]
    assert 400 < width < 6000
    assert 250 < height < 6000
    assert colours_in(path) > (60 if loaded else 3)
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


def test_one_vertex_and_no_link(tmp_path):
    plot_network(tmp_path / "one.png", np.zeros((0, 2), int), np.zeros((1, 2)), np.zeros(0), np.zeros(1), title="one")
    plot_network(tmp_path / "two.png", np.array([[0, 1]]), np.array([[0.0, 0], [1, 0]]), np.zeros(1), title="idle")
    assert {file.name for file in tmp_path.iterdir()} == {"one.png", "two.png"}


def test_links_round_the_edge_of_a_torus_are_bent_and_no_others():
    network = NETWORKS["torus"](bandwidth=1.0, latency=0.0)
    start, end = network.positions()[network.link_ends].transpose(1, 0, 2)
    around = np.linalg.norm(end - start, axis=1) > 1.5
    assert around.sum() == 2 * (3 + 4)
    assert (bends(network.link_ends, network.positions()) == around).all()


@pytest.mark.parametrize("name", ["ring", "switch", "fully connected", "clusters"])
def test_nothing_is_bent_where_nothing_is_in_the_way(name):
    network = NETWORKS[name](bandwidth=1.0, latency=0.0)
    assert not bends(network.link_ends, _spread(network.positions())).any()


def test_the_directions_of_a_link_are_apart_on_the_right_of_their_way():
    points = np.array([[0.0, 0.0], [2.0, 0.0]])
    there, back = arrows(np.array([[0, 1], [1, 0]]), points, np.full(2, 0.1))
    # The second axis points down: on the right of who walks to the right.
    assert there[:, 1].min() > 0 > back[:, 1].max()
    assert (np.argmax(there[:, 0]), np.argmin(back[:, 0])) == (len(there) // 2, len(back) // 2)  # tips


@pytest.mark.parametrize("length", [0.6, 1.0, 3.0])
def test_arrows_stay_between_their_vertices(length):
    (arrow,) = arrows(np.array([[0, 1]]), np.array([[0.0, 0.0], [length, 0.0]]), np.full(1, 0.1))
    assert 0.2 < arrow[:, 0].min() < arrow[:, 0].max() < length - 0.2


def test_bent_arrows_keep_off_the_vertices_between():
    points = np.array([[float(i), 0.0] for i in range(5)])
    for arrow in arrows(np.array([[0, 4], [4, 0]]), points, np.full(2, 0.13)):
        assert (np.abs(arrow[:, 1]) > 0.2).all()
        assert (np.abs(arrow[:, 1]) < 0.5).all()


def test_positions_of_any_unit_are_spread_alike():
    points = np.array([[3.0, 5.0], [3.5, 5.0], [3.0, 6.0]])
    np.testing.assert_allclose(_spread(points), [[0, 0], [1, 0], [0, 2]])
    np.testing.assert_allclose(_spread(1e-6 * points), _spread(points), rtol=1e-6)


def test_flat_networks_are_stretched_but_lines_stay_lines():
    wide, down = _spread(np.array([[0.0, 0.0], [70.0, 0.0], [35.0, 1.0]])).max(axis=0)
    assert wide / down == pytest.approx(3.5)
    assert _spread(np.array([[0.0, 2.0], [1.0, 2.0], [9.0, 2.0]]))[:, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "traffic", [np.zeros((3, 3)), np.eye(4), rng.random((64, 64)) * 1e9, np.ones((1, 1))], ids=lambda t: str(len(t))
)
def test_traffic_is_drawn(tmp_path, traffic):
    plot_traffic(tmp_path / "figure.png", traffic, "traffic")
    assert colours_in(tmp_path / "figure.png") > 20


ENDS, SPOTS = np.array([[0, 1], [1, 0]]), np.array([[0.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: plot_network(p, ENDS, SPOTS, np.ones(3), title=""), "link_value has 3 values but ends has 2"),
        (lambda p: plot_network(p, ENDS, SPOTS, None, np.ones(3), title=""), "node_value has 3 values but .* 2 nodes"),
        (lambda p: plot_network(p, ENDS + 1, SPOTS, title=""), "vertices up to 2, but there are 2"),
        (lambda p: plot_network(p, ENDS, SPOTS, title="", num_nodes=3), "num_nodes is 3, but there are 2"),
        (lambda p: plot_network(p, ENDS, np.zeros((0, 2)), title=""), "positions is empty"),
        (lambda p: plot_traffic(p, np.ones((2, 3)), ""), r"shape \(2, 3\)"),
        (lambda p: plot_traffic(p, np.ones((0, 0)), ""), "traffic_B is empty"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("largest", "unit"), [(0.0, "B"), (999.0, "B"), (2e3, "kB"), (3e6, "MB"), (4e9, "GB"), (5e15, "TB")]
)
def test_byte_unit_gives_handy_numbers(largest, unit):
    factor, name = style.byte_unit(largest)
    assert name == unit
    assert largest == 0 or largest * factor >= 1


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (999.4, "999"), (12808.0, "12808"), (0.0, "0")])
def test_digits_have_no_exponent_for_being_large(value, text):
    assert style.digits(value) == text
