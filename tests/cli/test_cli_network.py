"""`jaxmoe network` on every kind of network: its figures by hand, its files, and what it says of bad input."""

import json

import numpy as np
import pytest
from oracles.paths import xy_path
from refusal import refused

from jaxmoe.cli import network
from jaxmoe.experiment import traffic as traffic_module

SECTIONS = """
link: {bandwidth_GB_per_s: 2, latency_ns: 100}
router: {switching: cut_through, chunk_B: 64}
"""
MESH = f"mesh_shape: [2, 2]{SECTIONS}"
KINDS = {
    "mesh": MESH,
    "mesh_yx": f"mesh_shape: [2, 2]\nrouting: yx{SECTIONS}",
    "wafers": f"kind: wafers\nwafer_shape: [1, 2]\ngrid: [2, 1]\nborder: {{bandwidth_GB_per_s: 1}}{SECTIONS}",
    "torus": f"kind: torus\nmesh_shape: [2, 2]{SECTIONS}",
    "ring": f"kind: ring\nnodes: 4{SECTIONS}",
    "switch": f"kind: switch\nnodes: 4{SECTIONS}",
    "fully_connected": f"kind: fully_connected\nnodes: 4{SECTIONS}",
    "clusters": f"kind: clusters\nclusters: 2\nnodes_per_cluster: 2\nuplink: {{bandwidth_GB_per_s: 1}}{SECTIONS}",
    "graph": """
kind: graph
nodes: 4
links:
  - {from: 0, to: 1, bandwidth_GB_per_s: 2}
  - {from: 1, to: 2, bandwidth_GB_per_s: 2, one_way: true}
  - {from: 2, to: 1, bandwidth_GB_per_s: 1, latency_ns: 50, one_way: true}
  - {from: 2, to: 3, bandwidth_GB_per_s: 2}
  - {from: 3, to: 0, bandwidth_GB_per_s: 2}
router: {chunk_B: null}
""",
}
FIGURES = {"completion_s", "bytes", "bytes_hops", "max_link_load_B", "max_inject_B", "max_eject_B", "bottleneck"}


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(MESH)
    return path


@pytest.fixture
def traffic(tmp_path):
    """Writes arrays as an npz."""

    def write(**arrays):
        np.savez(tmp_path / "t.npz", **arrays)
        return tmp_path / "t.npz"

    return write


def lone(source, destination, size, nodes=4):
    matrix = np.zeros((nodes, nodes))
    matrix[source, destination] = size
    return matrix


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def every(count):
    rng = np.random.default_rng(7)
    return {f"m{index}": rng.integers(0, 4096, (4, 4)) for index in range(count)}


EVERYDAY = ("mesh_yx", "clusters", "wafers")


@pytest.mark.parametrize(
    "kind", [kind if kind in EVERYDAY else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_kind_of_network_runs(run, tmp_path, traffic, out, kind):
    (tmp_path / "machine.yaml").write_text(KINDS[kind])
    result = run("network", tmp_path / "machine.yaml", "--traffic", traffic(**every(3)), "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {
        "summary.json",
        "loads.npz",
        "network.png",
        "traffic.png",
        "model_vs_simulation.png",
    }
    summary = summary_of(out)
    assert summary["network"].keys() == {"kind", "nodes", "switches", "links", "bisection_B_per_s"}
    assert (summary["network"]["kind"], summary["network"]["nodes"]) == (kind.removesuffix("_yx"), 4)
    assert [*summary["matrices"]] == ["m0", "m1", "m2"]
    for matrix in summary["matrices"].values():
        assert matrix.keys() == FIGURES
        times = matrix["completion_s"]
        assert times.keys() == {"model", "des", "uncongested", "alpha_beta"}
        assert 0 < times["alpha_beta"] <= times["uncongested"]
        assert times["model"] == pytest.approx(times["des"], rel=0.35)
        assert matrix["bottleneck"]["busy_s"] <= times["model"]
    assert summary["agreement"]["points"] == 3


def test_the_summary_says_what_was_run(run, machine, traffic, out):
    path = traffic(**every(1))
    result = run(
        "network", machine, "--traffic", path, "--set", "router.chunk_B=128", "--order", "by_destination", "--out", out
    )
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["command"] == "network"
    assert (summary["hardware"]["name"], summary["hardware"]["router"]["chunk_B"]) == ("machine", 128)
    assert summary["traffic"] == {"path": str(path), "matrices": 1, "order": "by_destination"}
    assert (summary["seed"], summary["shown"]) == (0, "m0")
    assert summary["versions"].keys() == {"jaxmoe", "jax", "jaxlib", "numpy", "python"}
    assert summary["device"].keys() == {"platform", "kind", "count", "cpu_count"}
    assert summary["wall_s"]["stages"].keys() == {"load", "model", "simulate", "draw"}
    assert {file.name for file in out.iterdir()} == {"summary.json", "loads.npz", "network.png", "traffic.png"}


def test_a_lone_message_by_hand(run, machine, traffic, out):
    # From (0, 0) to (1, 1): 4 kB at 2 GB/s over two hops of 100 ns.
    run("network", machine, "--traffic", traffic(lone=lone(0, 3, 4000)), "--out", out)
    matrix = summary_of(out)["matrices"]["lone"]
    assert matrix["completion_s"] == pytest.approx(
        {"model": 2.2e-6, "des": 2.2e-6, "uncongested": 4.2e-6, "alpha_beta": 2.2e-6}
    )
    assert (matrix["bytes"], matrix["bytes_hops"], matrix["max_link_load_B"]) == (4000, 8000, 4000)
    assert (matrix["max_inject_B"], matrix["max_eject_B"]) == (4000, 4000)
    assert matrix["bottleneck"] == {"part": "link", "ends": [0, 2], "busy_s": pytest.approx(2e-6)}


def test_bytes_are_exact_where_32_bits_are_not(run, machine, traffic, out):
    odd = 2**40 + 1
    matrix = np.full((4, 4), odd, np.int64)
    run("network", machine, "--traffic", traffic(big=matrix), "--set", "router.chunk_B=null", "--out", out)
    figures = summary_of(out)["matrices"]["big"]
    loads = np.zeros(8, np.int64)
    for source in range(4):
        for destination in range(4):
            loads[xy_path((2, 2), source, destination)] += odd
    assert (figures["bytes"], figures["max_inject_B"], figures["max_eject_B"]) == (12 * odd, 3 * odd, 3 * odd)
    assert (figures["max_link_load_B"], figures["bytes_hops"]) == (loads.max(), loads.sum())


def test_figures_agree_with_booksim2(run, shared, configs, traffic, out):
    folder = shared / "reference" / "booksim2_mesh"
    records = {r["id"]: r for r in json.loads((folder / "index.json").read_text()) if (r["rows"], r["cols"]) == (3, 8)}
    with np.load(folder / "matrices.npz") as matrices:
        path = traffic(**{name: matrices[name] for name in records})
    machine = configs / "hardware" / "booksim2_s2.yaml"
    result = run("network", machine, "--traffic", path, "--set", "mesh_shape=[3, 8]", "--out", out)
    assert result.exit_code == 0, result.output
    found, error = summary_of(out)["matrices"], []
    for name, record in records.items():
        figures = found[name]
        for key, recorded in {
            "bytes": "total_flits",
            "bytes_hops": "flit_hops",
            "max_link_load_B": "max_link_load",
            "max_inject_B": "max_inject",
            "max_eject_B": "max_eject",
        }.items():
            assert figures[key] == record[recorded]
        if record["cls"].startswith("moe_"):
            error.append(abs(figures["completion_s"]["model"] / record["completion"]["vc4s2_shuffle"] - 1))
    assert len(error) == 48
    assert np.mean(error) < 0.05


def test_the_diagonal_is_free(run, machine, traffic, out):
    matrix = every(1)["m0"]
    run("network", machine, "--traffic", traffic(a=matrix, b=matrix * (1 - np.eye(4, dtype=int))), "--out", out)
    figures = summary_of(out)["matrices"]
    assert figures["a"] == figures["b"]


@pytest.mark.parametrize(
    ("ports", "bottleneck"),
    [
        (["ports.injection_GB_per_s=0.5"], {"part": "injection", "node": 1}),
        (["ports.ejection_GB_per_s=0.5"], {"part": "ejection", "node": 2}),
        (["ports.injection_GB_per_s=1", "ports.ejection_GB_per_s=0.5"], {"part": "ejection", "node": 2}),
    ],
)
def test_ports_that_limit_are_named(run, machine, traffic, out, ports, bottleneck):
    matrix = lone(1, 2, 1000) + lone(1, 0, 500) + lone(0, 2, 200)
    changes = [part for port in ports for part in ("--set", port)]
    result = run("network", machine, "--traffic", traffic(m=matrix), *changes, "--out", out)
    assert result.exit_code == 0, result.output
    found = summary_of(out)["matrices"]["m"]["bottleneck"]
    assert {key: found[key] for key in ("part", "node")} == bottleneck


def test_traffic_of_nothing_takes_no_time(run, machine, traffic, out):
    result = run("network", machine, "--traffic", traffic(none=np.zeros((4, 4))), "--out", out)
    assert result.exit_code == 0, result.output
    matrix = summary_of(out)["matrices"]["none"]
    assert set(matrix["completion_s"].values()) == {0}
    assert matrix["bottleneck"] is None


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ([], "shuffled"),
        (["--order", "staggered"], "staggered"),
        (["--set", "router.switching=store_and_forward"], "staggered"),
    ],
)
def test_packets_that_cut_through_mix_unless_told_otherwise(run, machine, traffic, out, options, order):
    assert run("network", machine, "--traffic", traffic(**every(1)), *options, "--out", out).exit_code == 0
    assert summary_of(out)["traffic"]["order"] == order


def test_orders_reach_model_and_simulator_and_seeds_the_simulator_alone(run, machine, traffic, tmp_path):
    machine.write_text(KINDS["switch"])
    path, seen = traffic(even=np.full((4, 4), 1000), **every(1)), {}
    for name, options in {
        "staggered": ["--order", "staggered"],
        "by_destination": ["--order", "by_destination"],
        "shuffled": ["--order", "shuffled"],
        "again": ["--order", "shuffled", "--seed", "0"],
        "other": ["--order", "shuffled", "--seed", "5"],
    }.items():
        result = run("network", machine, "--traffic", path, *options, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        seen[name] = [matrix["completion_s"] for matrix in summary_of(tmp_path / name)["matrices"].values()]
    model = {name: [times["model"] for times in some] for name, some in seen.items()}
    assert model["shuffled"] == model["again"] == model["other"]
    assert model["staggered"] != model["by_destination"]
    simulated = {name: [times["des"] for times in some] for name, some in seen.items()}
    assert simulated["shuffled"] == simulated["again"]
    assert simulated["shuffled"] != simulated["other"]
    assert simulated["staggered"] != simulated["by_destination"]


def test_all_matrices_are_one_call_of_the_model(run, machine, traffic, out, monkeypatch):
    shapes = []

    def evaluate(model, topology, matrices):
        shapes.append(matrices.shape)
        return whole(model, topology, matrices)

    whole = traffic_module._evaluate
    monkeypatch.setattr(traffic_module, "_evaluate", evaluate)
    assert run("network", machine, "--traffic", traffic(**every(5)), "--out", out).exit_code == 0
    assert shapes == [(5, 4, 4)]


def test_a_matrix_may_be_chosen_for_the_pictures(run, machine, traffic, out):
    path = traffic(small=lone(0, 1, 10), large=lone(0, 1, 1000))
    run("network", machine, "--traffic", path, "--out", out)
    assert summary_of(out)["shown"] == "large"
    run("network", machine, "--traffic", path, "--show", "small", "--out", out)
    assert summary_of(out)["shown"] == "small"


def test_the_table_lists_all_matrices_or_the_slowest(run, machine, traffic, tmp_path):
    few = run("network", machine, "--traffic", traffic(**every(40)), "--out", tmp_path / "few")
    assert all(f" m{index} " in few.stdout for index in range(40))
    matrices = {f"m{index}": lone(0, 1, 1000 + index) for index in range(41)}
    many = run("network", machine, "--traffic", traffic(**matrices), "--out", tmp_path / "many")
    assert [f" m{index} " in many.stdout for index in range(41)] == [False] * 21 + [True] * 20
    assert "and 21 more" in many.stdout


def test_names_may_look_like_markup(run, machine, traffic, out):
    result = run("network", machine, "--traffic", traffic(**{"[red]x": lone(0, 1, 10)}), "--out", out)
    assert result.exit_code == 0, result.output
    assert "[red]x" in result.stdout


BAD_ARRAYS = {
    "not square": (np.zeros((4, 3)), ["bad has shape (4, 3)", "expected (4, 4)"]),
    "other size": (np.zeros((5, 5)), ["bad has shape (5, 5)", "expected (4, 4)", "4 nodes"]),
    "a vector": (np.zeros(4), ["bad has shape (4,)", "expected (4, 4)"]),
    "a number": (np.array(1), ["bad has shape ()", "expected (4, 4)"]),
    "a stack": (np.zeros((1, 4, 4)), ["bad has shape (1, 4, 4)", "expected (4, 4)"]),
    "negative": (lone(2, 3, -5), ["bad[2, 3] is -5", "zero or more"]),
    "NaN": (lone(0, 1, np.nan), ["bad[0, 1] is nan", "zero or more"]),
    "infinite": (lone(1, 0, np.inf), ["bad[1, 0] is inf", "at most 1e+24"]),
    "too much": (lone(1, 0, 1e30), ["bad[1, 0] is 1e+30", "at most 1e+24"]),
    "text": (np.full((4, 4), "1"), ["bad holds values of type <U1", "numbers"]),
    "complex": (np.zeros((4, 4), complex), ["bad holds values of type complex128", "numbers"]),
    "objects": (np.full((4, 4), None), ["not a readable npz"]),
    "too many chunks": (lone(0, 1, 1e12), ["bad makes 1.56e+10 chunks of 64 B", "1e+07", "router.chunk_B"]),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_an_array_that_is_no_traffic_is_named(run, machine, traffic, out, case):
    array, expected = BAD_ARRAYS[case]
    path = traffic(good=lone(0, 1, 10), bad=array)
    refused(run("network", machine, "--traffic", path, "--out", out), out, "t.npz", *expected)


BAD_FILES = {
    "empty": (b"", ["is empty", "numpy.savez"]),
    "text": (b"0 1\n1 0\n", ["another kind of file", "numpy.savez"]),
    "one array": (b"\x93NUMPY\x01\x00", ["another kind of file"]),
    "a mere head": (b"PK\x03\x04", ["not a readable npz"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_npz_is_named(run, machine, tmp_path, out, case):
    content, expected = BAD_FILES[case]
    (tmp_path / "t.npz").write_bytes(content)
    refused(run("network", machine, "--traffic", tmp_path / "t.npz", "--out", out), out, "t.npz", *expected)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
def test_a_truncated_npz_is_named(run, machine, traffic, out, kept):
    path = traffic(**every(2))
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    refused(run("network", machine, "--traffic", path, "--out", out), out, "t.npz", "not a readable npz")


def test_a_damaged_npz_is_named(run, machine, traffic, out):
    path = traffic(**every(1))
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    refused(run("network", machine, "--traffic", path, "--out", out), out, "t.npz", "not a readable npz")


def test_an_npz_without_arrays_is_named(run, machine, traffic, out):
    refused(run("network", machine, "--traffic", traffic(), "--out", out), out, "t.npz", "no arrays", "4x4")


def test_a_missing_file_is_named(run, machine, tmp_path, out):
    refused(run("network", machine, "--traffic", tmp_path / "t.npz", "--out", out), out, "t.npz", "no such file")
    refused(run("network", machine, "--traffic", tmp_path, "--out", out), out, str(tmp_path), "not a readable npz")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--show", "m9"], ["--show is 'm9'", "m0, m1"]),
        (["--order", "random"], ["--order is 'random'", "staggered, by_destination, shuffled"]),
        (["--set", "link.bandwidth_GB_per_s=0"], ["link.bandwidth_GB_per_s is 0", "greater than 0"]),
        (["--set", "kind=tours"], ["kind is", "'torus'"]),
        (["--set", "link.bandwith=1"], ["link.bandwith is not a known key"]),
    ],
)
def test_bad_options(run, machine, traffic, out, options, expected):
    refused(run("network", machine, "--traffic", traffic(**every(2)), *options, "--out", out), out, *expected)


def test_a_network_in_two_parts(run, machine, traffic, out):
    machine.write_text("kind: graph\nnodes: 4\nlinks: [{from: 0, to: 1, bandwidth_GB_per_s: 1}]\n")
    result = run("network", machine, "--traffic", traffic(**every(1)), "--out", out)
    refused(result, out, "machine.yaml: links is", "node 0 to node 2")


def test_usage_errors_exit_alike(run, machine, traffic, out):
    path = traffic(**every(1))
    assert run("network", machine, "--out", out).exit_code == 2
    assert run("network", machine, "--traffic", path, "--seed", "-1", "--out", out).exit_code == 2
    assert run("network", machine, "--traffic", path).exit_code == 2
    assert not out.parent.exists()


def test_ctrl_c_leaves_nothing_behind(run, machine, traffic, out, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "simulate", interrupt)
    result = run("network", machine, "--traffic", traffic(**every(1)), "--out", out)
    assert result.exit_code == 130
    assert result.stderr == "interrupted; nothing was written\n"
    assert not out.parent.exists()
