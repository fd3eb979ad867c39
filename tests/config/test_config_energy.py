"""Energy, area and price of described machines: what goes where, sums by hand, and what is refused."""

import re

import numpy as np
import pytest

from jaxmoe.config import ConfigError, build_machine, load_hardware, unstated_energy

DIE = "die: {compute_TFLOPs_per_s: 4, memory_bandwidth_GB_per_s: 100, memory_capacity_GB: 8"


@pytest.fixture
def machine(tmp_path):
    """Builds the machine that a text describes."""

    def build(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return build_machine(load_hardware(path))

    return build


def test_energies_are_in_joules(machine):
    built = machine(
        f"""
mesh_shape: [1, 3]
{DIE}, energy_pJ_per_FLOP: 0.5, memory_energy_pJ_per_B: 30, idle_W: 20}}
link: {{bandwidth_GB_per_s: 50, energy_pJ_per_B: 4}}
links: [{{from: [0, 1], to: [0, 2], one_way: true, energy_pJ_per_B: 9}}]
"""
    ).energy
    assert float(built.compute) == pytest.approx(0.5e-12)
    assert {name: float(each) for name, each in built.memory.items()} == pytest.approx({"memory": 30e-12})
    assert float(built.idle) == 20
    assert built.links.keys() == {"link"}
    # Up the line, then down.
    np.testing.assert_allclose(built.links["link"], [4e-12, 9e-12, 4e-12, 4e-12], rtol=1e-6)


def test_links_of_every_kind_have_their_own(machine):
    two = "link: {bandwidth_GB_per_s: 50, energy_pJ_per_B: 1}"
    built = machine(
        f"{{kind: wafers, wafer_shape: [1, 2], grid: [1, 2], {DIE}}}, {two},"
        " border: {bandwidth_GB_per_s: 10, energy_pJ_per_B: 7}}"
    ).energy
    np.testing.assert_allclose(built.links["link"], np.array([1, 0, 1, 1, 0, 1]) * 1e-12, rtol=1e-6)
    np.testing.assert_allclose(built.links["border"], np.array([0, 7, 0, 0, 7, 0]) * 1e-12, rtol=1e-6)
    built = machine(
        f"{{kind: clusters, clusters: 2, nodes_per_cluster: 2, {DIE}}}, {two}, uplink: {{bandwidth_GB_per_s: 10}}}}"
    )
    ends = built.topology.link_ends
    assert built.energy.links.keys() == {"link"}
    np.testing.assert_allclose(built.energy.links["link"], 1e-12 * (ends.min(axis=1) < 4), rtol=1e-6)


def test_a_graph_has_them_link_by_link_both_ways(machine):
    built = machine(
        f"""
{{kind: graph, nodes: 3, {DIE}}}, links: [
  {{from: 0, to: 1, bandwidth_GB_per_s: 5, energy_pJ_per_B: 3, price_per_GB_per_s: 2}},
  {{from: 1, to: 2, bandwidth_GB_per_s: 7}}]}}
"""
    )
    by_ends = dict(zip(map(tuple, built.topology.link_ends.tolist()), built.energy.links["link"].tolist(), strict=True))
    assert by_ends == pytest.approx({(0, 1): 3e-12, (1, 0): 3e-12, (1, 2): 0, (2, 1): 0})
    assert float(built.price) == pytest.approx(2 * 2 * 5)


def test_levels_of_memory_have_their_own(machine):
    built = machine(
        """
mesh_shape: [1, 2]
die: {compute_TFLOPs_per_s: 4}
link: {bandwidth_GB_per_s: 50}
memory:
  - {name: sram, bandwidth_GB_per_s: 500, capacity_GB: 0.5, energy_pJ_per_B: 1, area_mm2_per_GB: 200}
  - {name: ddr, bandwidth_GB_per_s: 25, nodes_per_channel: 2, price_per_GB_per_s: 3}
"""
    )
    assert {name: float(each) for name, each in built.energy.memory.items()} == pytest.approx({"sram": 1e-12})
    assert float(built.area) == pytest.approx(2 * 0.5 * 200)
    assert float(built.price) == pytest.approx(1 * 25 * 3)  # one channel


def test_area_and_price_by_hand(machine):
    built = machine(
        f"""
mesh_shape: [2, 2]
{DIE}, area_mm2: 50, area_mm2_per_TFLOPs_per_s: 2.5, memory_area_mm2_per_GB_per_s: 0.1, memory_area_mm2_per_GB: 1,
  price: 300, price_per_TFLOPs_per_s: 10, memory_price_per_GB_per_s: 0.5, memory_price_per_GB: 12}}
link: {{bandwidth_GB_per_s: 40, area_mm2_per_GB_per_s: 0.05, price_per_GB_per_s: 0.2}}
links: [{{from: [0, 0], to: [0, 1], one_way: true, bandwidth_GB_per_s: 20}}]
"""
    )
    gigabytes_per_s = 7 * 40 + 20  # eight directed links
    assert float(built.area) == pytest.approx(4 * (50 + 2.5 * 4 + 0.1 * 100 + 8) + 0.05 * gigabytes_per_s)
    assert float(built.price) == pytest.approx(4 * (300 + 10 * 4 + 0.5 * 100 + 12 * 8) + 0.2 * gigabytes_per_s)


def test_single_dies_count_with_numbers_of_their_own(machine):
    built = machine(
        f"""
mesh_shape: [2, 2]
{DIE}, area_mm2: 50, area_mm2_per_TFLOPs_per_s: 2.5, memory_area_mm2_per_GB: 1}}
dies: [{{nodes: [0, 3], compute_TFLOPs_per_s: 1}}, {{nodes: [1], memory_capacity_GB: 2}}]
link: {{bandwidth_GB_per_s: 40}}
"""
    )
    assert float(built.area) == pytest.approx(4 * 50 + 2.5 * (4 + 4 + 1 + 1) + 8 + 2 + 8 + 8)


def test_what_is_not_stated_is_none(machine, tmp_path):
    built = machine(f"{{mesh_shape: [1, 2], {DIE}}}, link: {{bandwidth_GB_per_s: 50}}}}")
    assert built.energy is built.area is built.price is None
    hardware = load_hardware(tmp_path / "mine.yaml", ["die.idle_W=3"])
    assert unstated_energy(hardware) == ["die.energy_pJ_per_FLOP", "die.memory_energy_pJ_per_B", "link.energy_pJ_per_B"]
    assert build_machine(hardware).energy.links == {}


BAD = {
    "die.energy_pJ_per_FLOP=-1": ["die.energy_pJ_per_FLOP is -1", "at least 0", "the energy of a FLOP in pJ"],
    "link.energy_pJ_per_B=-0.5": ["link.energy_pJ_per_B is -0.5", "at least 0", "one hop, in pJ"],
    "link.energy_pJ_per_b=1": ["not a known key", "Did you mean energy_pJ_per_B?"],
    "die.idle_W=much": ['die.idle_W is "much"', "a number", "in W"],
    "die.area_mm2=.inf": ["die.area_mm2 is Infinity", "finite"],
    "die.memory_energy_pJ_per_B=3": ["die.memory_energy_pJ_per_B is 3", "memory_bandwidth_GB_per_s is null"],
    "die.memory_price_per_GB=3": ["die.memory_price_per_GB is 3", "Write memory_capacity_GB as well"],
    "memory=[{name: ddr, bandwidth_GB_per_s: 1, price_per_GB: 2}]": ["memory.0.price_per_GB is 2", "capacity_GB"],
    "memory=[{name: a, bandwidth_GB_per_s: 1}, {name: a, bandwidth_GB_per_s: 2}]": ['memory.1.name is "a"', "Rename"],
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_clear_error(tmp_path, override):
    path = tmp_path / "mine.yaml"
    path.write_text("{mesh_shape: [1, 2], die: {compute_TFLOPs_per_s: 4}, link: {bandwidth_GB_per_s: 50}}")
    with pytest.raises(ConfigError) as caught:
        load_hardware(path, [override])
    assert len(str(caught.value).splitlines()) == 1
    assert all(part in str(caught.value) for part in BAD[override]), str(caught.value)


def test_energy_of_memory_is_told_once(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{mesh_shape: [1, 2], die: {compute_TFLOPs_per_s: 4}, link: {bandwidth_GB_per_s: 50}}")
    with pytest.raises(ConfigError, match=r"die.memory_energy_pJ_per_B is 3.0; expected no value beside memory"):
        load_hardware(path, ["memory=[{name: a, bandwidth_GB_per_s: 1}]", "die.memory_energy_pJ_per_B=3"])


def test_shipped_machines_say_where_their_constants_are_from(configs):
    stated = 0
    for path in (configs / "hardware").glob("*.yaml"):
        for line in path.read_text().splitlines():
            if re.match(r"\s*(\w*energy_pJ_per_\w+|idle_W|\w*(area_mm2|price)\w*):", line):
                assert re.search(r"# .*(moentwine|I, )", line), (path.name, line)
                stated += 1
    assert stated == 4  # machines that differ from another in a few numbers have theirs from it


@pytest.mark.parametrize(("name", "pJ_per_bit"), [("moentwine_4x8x8", 0.1), ("dgx_b200_4x8", 1.3), ("nvl72", 1.3)])
def test_published_energies(configs, name, pJ_per_bit):
    built = build_machine(load_hardware(configs / "hardware" / f"{name}.yaml"))
    (each,) = built.energy.links.values()
    assert np.unique(each[each > 0]) == pytest.approx(8e-12 * pJ_per_bit)
    assert built.energy.compute is built.energy.idle is built.area is built.price is None
