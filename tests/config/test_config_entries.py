"""Entries of a list that have names are set by name, as `calibrate` and spaces write them."""

from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, load_scenario

SCENARIO = Path(__file__).resolve().parents[2] / "configs/scenarios/expert_streaming/qwen3-30b-a3b_2x2.yaml"


def test_a_level_of_memory_is_set_by_its_name():
    made = load_scenario(SCENARIO, ["hardware.memory.ddr.bandwidth_GB_per_s=50"])
    levels = {level.name: level for level in made.hardware.memory}
    assert levels["ddr"].bandwidth_GB_per_s == 50
    assert levels["sram"] == load_scenario(SCENARIO).hardware.memory[0]


def test_an_error_in_an_entry_says_where_it_was_set():
    with pytest.raises(ConfigError, match=r"--set: hardware\.memory\.1\.bandwidth_GB_per_s is -5"):
        load_scenario(SCENARIO, ["hardware.memory.ddr.bandwidth_GB_per_s=-5"])


def test_an_entry_that_is_not_there_is_told():
    with pytest.raises(
        ConfigError, match=r"hardware\.memory\.hbm\.bandwidth_GB_per_s cannot be set: hardware\.memory is"
    ):
        load_scenario(SCENARIO, ["hardware.memory.hbm.bandwidth_GB_per_s=5"])
