"""Files state the format that their keys are of; one that is newer than this version is one clear error."""

import pytest
import yaml

from jaxmoe.config import ConfigError, build_topology, commented, load_hardware, load_scenario, resolved
from jaxmoe.config.explain import ConfigSource
from jaxmoe.config.files import FORMAT
from jaxmoe.config.loader import load_scenario_with


def stating(path, number):
    path.write_text(f"format: {number}\n{path.read_text()}")
    return path


@pytest.mark.parametrize("part", ["scenarios/one", "hardware/mine", "models/small", "workloads/plain"])
def test_every_file_of_a_scenario_may_state_the_present_format(tree, scenario_file, part):
    before = load_scenario(scenario_file)
    stating(tree / f"{part}.yaml", FORMAT)
    assert load_scenario(scenario_file) == before


@pytest.mark.parametrize("part", ["scenarios/one", "hardware/mine", "models/small", "workloads/plain"])
@pytest.mark.parametrize(
    ("number", "remedy"), [(FORMAT + 1, "Install a newer jaxmoe"), ("one", "Write format: 2"), ("true", "Write")]
)
def test_another_format_is_one_clear_error(tree, scenario_file, part, number, remedy):
    path = stating(tree / f"{part}.yaml", number)
    with pytest.raises(ConfigError, match=rf"{path.name}: format is .*; expected {FORMAT}.* {remedy}"):
        load_scenario(scenario_file)


def test_a_machine_alone_states_its_format_and_is_written_with_it(tree):
    machine = load_hardware(tree / "hardware" / "mine.yaml")
    text = commented(machine)
    assert yaml.safe_load(text)["format"] == FORMAT
    (tree / "again.yaml").write_text(text)
    assert resolved(load_hardware(tree / "again.yaml")) == resolved(machine)
    with pytest.raises(ConfigError, match="format is 7"):
        load_hardware(stating(tree / "hardware" / "mine.yaml", 7))


LINKS = """
mesh_shape: [2, 3]
link: {bandwidth_GB_per_s: 50}
links: [{from: [0, 0], to: [0, 1], bandwidth_GB_per_s: 25}]
"""


def rates(path, *overrides: str) -> dict[tuple[int, int], float]:
    """Bandwidth in GB/s of all links that are not of 50, by their nodes."""
    network = build_topology(load_hardware(path, overrides))
    every = zip(network.link_ends.tolist(), network.link_bandwidth.tolist(), strict=True)
    return {(start, end): round(rate / 1e9) for (start, end), rate in every if round(rate / 1e9) != 50}


@pytest.fixture
def machine_file(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(LINKS)
    return path


def test_a_link_of_a_mesh_is_both_ways_since_format_2_and_still_one_way_in_files_of_before(machine_file):
    assert rates(stating(machine_file, 2)) == {(0, 1): 25, (1, 0): 25}
    machine_file.write_text(LINKS)
    assert rates(stating(machine_file, 1)) == {(0, 1): 25}
    machine_file.write_text(LINKS.replace("to: [0, 1]", "to: [0, 1], one_way: true"))
    assert rates(machine_file) == {(0, 1): 25}


@pytest.mark.parametrize("part", ["scenarios/one", "hardware/mine"])
def test_links_that_do_not_say_of_which_format_they_are_are_refused(tree, scenario_file, part):
    links = "links: [{from: [0, 0], to: [0, 1], bandwidth_GB_per_s: 25}]"
    machine = tree / "hardware" / "mine.yaml"
    if part == "hardware/mine":
        machine.write_text(machine.read_text().replace(", one_way: true", ""))
    else:
        machine = scenario_file
        inline = f"hardware: {{mesh_shape: [2, 3], link: {{bandwidth_GB_per_s: 5}}, {links}}}"
        machine.write_text(machine.read_text().replace("hardware: mine", inline))
    with pytest.raises(ConfigError, match=r"mine|one.*links.0 has no one_way.*Write format: 2, or format: 1"):
        load_scenario(scenario_file)


def test_a_row_or_a_column_of_links_has_one_entry(machine_file):
    """Node [x, y] of the 2x3 mesh is in row x and column y, and has the number 3 x + y."""
    head = LINKS[: LINKS.index("links:")]
    machine_file.write_text(head + "links: [{row: 1, bandwidth_GB_per_s: 10}, {column: 2, bandwidth_GB_per_s: 20}]")
    row = {(3, 4): 10, (4, 3): 10, (4, 5): 10, (5, 4): 10}
    assert rates(machine_file) == row | {(2, 5): 20, (5, 2): 20}


def test_a_row_without_links_is_refused(machine_file):
    machine_file.write_text("mesh_shape: [3, 1]\nlink: {bandwidth_GB_per_s: 50}\nlinks: [{row: 0, latency_ns: 1}]\n")
    with pytest.raises(ConfigError, match=r"links.0 is .*a row or column with links \(the mesh is 3x1\)"):
        load_hardware(machine_file)


@pytest.mark.parametrize("number", [1, 2])
def test_links_of_an_override_say_whether_they_are_one_way(machine_file, number):
    """The value has no format of its own, and means the same over files of each."""
    stating(machine_file, number)
    link = "{from: [0, 1], to: [0, 2], bandwidth_GB_per_s: 9"
    with pytest.raises(ConfigError, match=r"--set: links.0 has no one_way.*Write one_way: false"):
        load_hardware(machine_file, [f"links=[{link}}}]"])
    ways = {True: {(1, 2): 9}, False: {(1, 2): 9, (2, 1): 9}}
    for one_way, expected in ways.items():
        assert rates(machine_file, f"links=[{link}, one_way: {str(one_way).lower()}}}]") == expected


@pytest.mark.parametrize("key", ["hardware.links", "hardware"])
def test_links_of_an_axis_say_whether_they_are_one_way(scenario_file, key):
    links = [{"from": [0, 0], "to": [0, 1], "bandwidth_GB_per_s": 9}]
    machine = {"mesh_shape": [2, 3], "link": {"bandwidth_GB_per_s": 5}, "links": links}
    value = links if key == "hardware.links" else machine
    with pytest.raises(ConfigError, match=r"study.yaml: hardware.links.0 has no one_way"):
        load_scenario_with(scenario_file, {key: value}, ConfigSource("study.yaml", scenario_file.parent))
