"""Machines of every kind: what is built from them, and what is said of those that cannot be."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.config import (
    ConfigError,
    build_layer_model,
    build_machine,
    build_topology,
    load_hardware,
    load_scenario,
)
from jaxmoe.hardware import Graph, Mesh

LINK = "link: {bandwidth_GB_per_s: 50, latency_ns: 100}\n"
UPLINK = "uplink: {bandwidth_GB_per_s: 5}\n"
GRAPH = """
kind: graph
nodes: 3
switches: 1
links:
  - {from: 0, to: 3, bandwidth_GB_per_s: 50, latency_ns: 100}
  - {from: 3, to: 1, bandwidth_GB_per_s: 40, one_way: true}
  - {from: 1, to: 3, bandwidth_GB_per_s: 20, latency_ns: 7, one_way: true}
  - {from: 1, to: 2, bandwidth_GB_per_s: 10}
  - {from: 2, to: 3, bandwidth_GB_per_s: 5}
"""
KINDS = {
    "mesh": f"mesh_shape: [2, 3]\n{LINK}",
    "wafers": f"kind: wafers\nwafer_shape: [2, 3]\ngrid: [2, 1]\n{LINK}border: {{bandwidth_GB_per_s: 5}}\n",
    "torus": f"kind: torus\nmesh_shape: [3, 4]\n{LINK}",
    "ring": f"kind: ring\nnodes: 5\n{LINK}",
    "switch": f"kind: switch\nnodes: 4\n{LINK}",
    "fully_connected": f"kind: fully_connected\nnodes: 4\n{LINK}",
    "clusters": f"kind: clusters\nclusters: 2\nnodes_per_cluster: 3\nspines: 2\n{LINK}{UPLINK}",
    "graph": GRAPH,
}
SIZES = {  # nodes, vertices, directed links
    "mesh": (6, 6, 14),
    "wafers": (12, 12, 34),
    "torus": (12, 12, 48),
    "ring": (5, 5, 10),
    "switch": (4, 5, 8),
    "fully_connected": (4, 4, 12),
    "clusters": (6, 10, 20),
    "graph": (3, 4, 8),
}


@pytest.fixture
def load(tmp_path: Path):
    """Reads a machine from text."""

    def read(text: str, *overrides: str):
        (tmp_path / "machine.yaml").write_text(text)
        return load_hardware(tmp_path / "machine.yaml", list(overrides))

    return read


def links_of(topology) -> dict[tuple[int, int], tuple[float, float]]:
    """Bandwidth in GB/s and latency in ns by the ends of a link."""
    numbers = zip(topology.link_bandwidth.tolist(), topology.link_latency.tolist(), strict=True)
    return {
        (start, end): (round(rate / 1e9, 4), round(delay * 1e9, 4))
        for (start, end), (rate, delay) in zip(topology.link_ends.tolist(), numbers, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_builds_with_the_sections_that_all_share(load, kind):
    shared = [
        "ports={injection_GB_per_s: 30, ejection_GB_per_s: 60}",
        "router={endpoint_latency_ns: 40, efficiency: 0.8}",
        "die={compute_TFLOPs_per_s: 2}",
    ]
    hardware = load(KINDS[kind], *shared)
    assert hardware.kind == kind
    machine = build_machine(hardware)
    topology, (nodes, vertices, links) = machine.topology, SIZES[kind]
    assert (topology.num_nodes, len(topology.positions()), topology.num_links) == (nodes, vertices, links)
    np.testing.assert_allclose(topology.injection_bandwidth, np.full(nodes, 30e9), rtol=1e-6)
    np.testing.assert_allclose(topology.ejection_bandwidth, np.full(nodes, 60e9), rtol=1e-6)
    assert float(topology.endpoint_latency) == pytest.approx(40e-9)
    assert float(topology.efficiency) == pytest.approx(0.8)
    np.testing.assert_allclose(machine.die.flops, np.full(nodes, 2e12), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_ideal_unless_told_otherwise(load, kind):
    topology = build_topology(load(KINDS[kind]))
    assert topology.injection_bandwidth is topology.ejection_bandwidth is None
    assert (float(topology.endpoint_latency), float(topology.efficiency)) == (0, 1)


@pytest.mark.parametrize("kind", ["mesh", "torus", "ring", "switch", "fully_connected"])
def test_links_are_alike_where_one_section_describes_them(load, kind):
    assert set(links_of(build_topology(load(KINDS[kind]))).values()) == {(50, 100)}


def test_links_across_a_border_have_their_own_numbers(load):
    topology = build_topology(load(KINDS["wafers"]))
    assert isinstance(topology, Mesh)
    assert topology.shape == (4, 3)
    across = {ends for ends, numbers in links_of(topology).items() if numbers == (5, 0)}
    assert across == {(3, 6), (6, 3), (4, 7), (7, 4), (5, 8), (8, 5)}


def test_uplinks_have_their_own_numbers(load):
    links = links_of(build_topology(load(KINDS["clusters"])))
    assert {numbers for ends, numbers in links.items() if min(ends) >= 6} == {(5, 0)}
    assert {numbers for ends, numbers in links.items() if min(ends) < 6} == {(50, 100)}


@pytest.mark.parametrize("kind", ["mesh", "wafers"])
@pytest.mark.parametrize("routing", ["xy", "yx"])
def test_meshes_are_routed_as_told(load, kind, routing):
    topology = build_topology(load(KINDS[kind], f"routing={routing}"))
    first, second = topology.paths()[0][4]
    turn = 3 if routing == "xy" else 1
    assert topology.link_ends[[first, second]].tolist() == [[0, turn], [turn, 4]]


def test_a_link_is_both_ways_unless_it_is_one_way(load):
    links = links_of(build_topology(load(GRAPH)))
    assert (links[0, 3], links[3, 0]) == ((50, 100), (50, 100))
    assert (links[3, 1], links[1, 3]) == ((40, 0), (20, 7))


def test_given_paths_are_taken_and_the_others_are_shortest(load):
    topology = build_topology(load(GRAPH, "paths=[[0, 3, 1, 2]]"))
    assert isinstance(topology, Graph)

    def vertices(source, destination):
        return [source, *(int(topology.link_ends[link, 1]) for link in topology.paths()[source][destination])]

    assert vertices(0, 2) == [0, 3, 1, 2]
    assert vertices(2, 0) == [2, 3, 0]


def test_positions_are_those_given_or_circles(load):
    given = build_topology(load(GRAPH, "positions=[[0, 0], [1, 0], [2.5, 0], [1, 1]]")).positions()
    assert given.tolist() == [[0, 0], [1, 0], [2.5, 0], [1, 1]]
    circle = build_topology(load(GRAPH)).positions()
    np.testing.assert_allclose(np.linalg.norm(circle, axis=1), [1, 1, 1, 0], rtol=1e-6)
    several = build_topology(load(GRAPH + "  - {from: 4, to: 0, bandwidth_GB_per_s: 1}\n", "switches=2")).positions()
    np.testing.assert_allclose(np.linalg.norm(several, axis=1), [1, 1, 1, 0.5, 0.5], rtol=1e-6)


def test_numbers_may_be_very_small_and_very_large(load):
    text = "kind: ring\nnodes: 3\nlink: {bandwidth_GB_per_s: 1e-9, latency_ns: 1e12}\n"
    topology = build_topology(load(text))
    assert set(topology.link_bandwidth.tolist()) == {1.0}
    assert set(topology.link_latency.tolist()) == {1000.0}


def test_a_machine_without_dies_is_no_platform(load):
    with pytest.raises(ConfigError, match="machine: die is null; expected the compute"):
        build_machine(load(KINDS["ring"]))


# Kind, text in it, what it becomes, and what the message has to say.
BAD = {
    "kind": ("ring", "ring", "rnig", ['kind is "rnig"', "'ring', 'switch'", "Write one of them"]),
    "no link": ("ring", LINK, "", ["link is missing", "bandwidth and latency of the links"]),
    "key": ("switch", "nodes", "node", ["node is not a known key", "its value is 4", "Did you mean nodes?"]),
    "zero": ("torus", "s: 50", "s: 0", ["link.bandwidth_GB_per_s is 0", "greater than 0", "for example 50"]),
    "negative": ("switch", "s: 50", "s: -1", ["link.bandwidth_GB_per_s is -1", "greater than 0"]),
    "late": ("ring", "ns: 100", "ns: 1e13", ["link.latency_ns is 10000000000000.0", "at most 1e+12"]),
    "border": ("wafers", "s: 5}", "s: 0}", ["border.bandwidth_GB_per_s is 0", "greater than 0"]),
    "uplink": ("clusters", "s: 5}", "s: -5}", ["uplink.bandwidth_GB_per_s is -5", "greater than 0"]),
    "no uplink": ("clusters", UPLINK, "", ["uplink is missing", "a switch and a spine"]),
    "too few": ("ring", "nodes: 5", "nodes: 1", ["nodes is 1", "at least 2"]),
    "too many": ("fully_connected", "nodes: 4", "nodes: 513", ["nodes is 513", "at most 512"]),
    "one of a torus": ("torus", "[3, 4]", "[1, 1]", ["mesh_shape is [1, 1]", "at least two nodes"]),
    "many of a torus": ("torus", "[3, 4]", "[32, 32]", ["mesh_shape is [32, 32]", "at most 512", "1024"]),
    "one of wafers": ("wafers", "[2, 3]\ngrid: [2, 1]", "[1, 1]\ngrid: [1, 1]", ["wafer_shape is [1, 1]", "two nodes"]),
    "many wafers": ("wafers", "[2, 1]", "[33, 1]", ["grid is [33, 1]", "at most 64", "66x3", "Lower grid"]),
    "a lone cluster": (
        "clusters",
        "clusters: 2\nnodes_per_cluster: 3",
        "clusters: 1\nnodes_per_cluster: 1",
        ["nodes_per_cluster is 1", "at least two nodes", "Raise it or clusters"],
    ),
    "many clusters": ("clusters", "clusters: 2", "clusters: 200", ["clusters is 200", "at most 512", "600"]),
    "no cluster": ("clusters", "clusters: 2", "clusters: 0", ["clusters is 0", "at least 1", "the number of clusters"]),
    "outside": ("graph", "to: 2,", "to: 9,", ["links.3.to is 9", "0..3", "switches come after them"]),
    "itself": ("graph", "from: 1, to: 2,", "from: 2, to: 2,", ["links.3.to is 2", "another end than from"]),
    "twice": ("graph", "from: 1, to: 2,", "from: 3, to: 0,", ["links.3 is [3, 0]", "each direction once", "one_way"]),
    "no way back": (
        "graph",
        "from: 1, to: 3, bandwidth_GB_per_s: 20, latency_ns: 7, one_way: true",
        "from: 1, to: 0, bandwidth_GB_per_s: 20",
        ["links.1 is [3, 1]", "a link from 1 to 3 as well", "leave one_way out"],
    ),
    "two parts": (
        "graph",
        "nodes: 3\nswitches: 1",
        "nodes: 5",
        ["links is [[0, 3]", "node 0 to node 4", "Add the missing links"],
    ),
    "no links": ("graph", GRAPH[GRAPH.index("links:") :], "links: []\n", ["links is []", "join all nodes"]),
    "graph key": ("graph", "latency_ns", "latncy_ns", ["links.0.latncy_ns is not", "Did you mean latency_ns?"]),
    "graph zero": ("graph", "s: 40", "s: 0", ["links.1.bandwidth_GB_per_s is 0", "greater than 0"]),
}


def message(load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_machine_is_named_with_key_value_and_remedy(load, tmp_path, case):
    kind, old, new, needles = BAD[case]
    assert old in KINDS[kind]
    said = message(load, KINDS[kind].replace(old, new, 1))
    assert said.startswith(f"{tmp_path / 'machine.yaml'}: ")
    assert "\n" not in said
    for needle in needles:
        assert needle in said


BAD_OVERRIDES = {
    "paths=[[0, 1]]": ["paths.0 is [0, 1]", "links that are there", "from 0 to 1"],
    "paths=[[0, 3, 1], [0, 3, 1]]": ["paths.1 is [0, 3, 1]", "one path from a node to another", "Remove"],
    "paths=[[0, 3]]": ["paths.0 is [0, 3]", "one of the nodes 0..2", "both ends included"],
    "paths=[[0]]": ["paths.0 is [0]", "from one of the nodes"],
    "paths=[[]]": ["paths.0 is []", "from one of the nodes"],
    "paths=[[0, 3, 2, 3, 1]]": ["paths.0 is [0, 3, 2, 3, 1]", "no vertex twice"],
    "paths=[[0, x, 1]]": ["paths.0.1 is", "a whole number"],
    "paths=[0, 1]": ["paths.0 is 0", "expected a list", "such as [0, 4, 1]"],
    "positions=[[0, 1]]": ["positions is [[0.0, 1.0]]", "each of 4 nodes and switches"],
    "positions=[[0, 1], [1, 1], [2, 1], [0, 1]]": ["positions is", "positions that differ", "Move"],
    "positions=[[0], [1, 1], [2, 1], [0, 1]]": ["positions.0 is [0]", "two numbers in brackets"],
    "links.0=1": ["links.0 cannot be set", "Set links as a whole"],
    "kind=null": ["kind is null", "one of 'mesh'"],
    "kind={}": ["kind is {}", "one of 'mesh'"],
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_override_of_a_graph_is_named(load, override):
    said = message(load, GRAPH, override)
    assert said.startswith("--set: ")
    for needle in BAD_OVERRIDES[override]:
        assert needle in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_scenario_takes_every_kind_with_dies(tree, kind):
    (tree / "hardware" / "mine.yaml").write_text(f"{KINDS[kind]}die: {{compute_TFLOPs_per_s: 2}}\n")
    scenario = load_scenario(tree / "scenarios" / "one.yaml", ["strategies.hybrid_regions=1"])
    assert scenario.hardware.num_nodes == SIZES[kind][0]
    assert build_layer_model(scenario, "sharded").machine.num_nodes == SIZES[kind][0]


def test_regions_of_a_machine_that_is_no_mesh_are_equal_groups(tree):
    (tree / "hardware" / "mine.yaml").write_text(f"{KINDS['torus']}die: {{compute_TFLOPs_per_s: 2}}\n")
    load_scenario(tree / "scenarios" / "one.yaml", ["strategies.hybrid_regions=12"])
    with pytest.raises(ConfigError, match=r"hybrid_regions is 5; .* the 12 nodes\. Write one of 1, 2, 3, 4, 6"):
        load_scenario(tree / "scenarios" / "one.yaml", ["strategies.hybrid_regions=5"])


KEYS = ["kind", "nodes", "switches", "links", "paths", "positions", "link", "mesh_shape", "grid", "spines", "die", "0"]
VALUES = [
    "{}",
    "[]",
    "[[]]",
    "[0]",
    "[[0, 0]]",
    "[{from: 0}]",
    "null",
    "true",
    "-1",
    "3",
    "1e99",
    ".nan",
    "mesh",
    "ring",
]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([*KINDS]),
    keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
    value=st.sampled_from(VALUES),
)
def test_nothing_that_is_typed_ends_in_another_error(load, kind, keys, value):
    with contextlib.suppress(ConfigError):
        build_topology(load(KINDS[kind], f"{'.'.join(keys)}={value}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["router.num_vcs=0"], "router.num_vcs is 0"),
        (["router.num_vcs=2", "router.vc_buf_size=0"], "router.vc_buf_size is 0"),
        (["router.num_vcs=2", "router.priority=random"], 'router.priority is "random"'),
        (["router.num_vcs=2", "router.internal_speedup=0.5"], "router.internal_speedup is 0.5"),
        (["router.num_vcs=63"], "router.num_vcs is 63"),
        (["router.num_vcs=2", "router.switching=cut_through", "router.flit_B=64"], "router.vc_buf_size is 8"),
        (["router.num_vcs=2", "router.flit_B=4096"], "router.flit_B is 4096"),
        (["router.num_vcs=1", "router.dateline=true"], "router.num_vcs is 1"),
        (["router.switching=wormhole"], 'router.switching is "wormhole"'),
        (["router.num_vcs=2", "router.chunk_B=null"], "router.flit_B is null"),
    ],
)
def test_routers_that_cannot_be_are_refused_by_name(tmp_path, overrides, message):
    path = tmp_path / "machine.yaml"
    path.write_text("mesh_shape: [4, 4]\nlink: {bandwidth_GB_per_s: 50, latency_ns: 100}\n")
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as error:
        load_hardware(path, overrides)
    assert str(error.value).count("\n") <= 1


def test_nodes_have_as_many_ports_as_links_whatever_switches_have(configs):
    router = build_topology(load_hardware(configs / "hardware" / "nvl72.yaml", ["router.num_vcs=2"])).router
    assert float(router.ports_per_node) == 1


def test_a_router_is_built_as_it_is_told(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(
        "mesh_shape: [4, 4]\nlink: {bandwidth_GB_per_s: 50, latency_ns: 100}\nports: {per_node: 2}\n"
        "router: {switching: wormhole, chunk_B: 1024, flit_B: 64, num_vcs: 4, vc_buf_size: 16, internal_speedup: 1.5, "
        "credit_delay: 2, alloc_iters: 3, priority: network_age, endpoint_latency_ns: 50}\n"
    )
    router = build_topology(load_hardware(path)).router
    numbers = (router.num_vcs, router.vc_buf_size, router.flit_bytes, router.internal_speedup)
    assert [float(number) for number in numbers] == [4, 16, 64, 1.5]
    assert [float(n) for n in (router.credit_delay, router.alloc_iters, router.ports_per_node)] == [2, 3, 2]
    assert (router.priority, router.wormhole, router.dateline) == ("network_age", True, False)
    assert build_topology(load_hardware(path, ["router.num_vcs=null", "router.switching=cut_through"])).router is None
    for limits, most in ((["ports.per_node=null"], 4), (["ports.per_node=null", "ports.injection_GB_per_s=100"], 1)):
        assert float(build_topology(load_hardware(path, limits)).router.ports_per_node) == most
