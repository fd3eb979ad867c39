"""Files state the format that their keys are of; one that is newer than this version is one clear error."""

import pytest
import yaml

from jaxmoe.config import ConfigError, commented, load_hardware, load_scenario, resolved
from jaxmoe.config.files import FORMAT


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
    ("number", "remedy"), [(FORMAT + 1, "Install a newer jaxmoe"), ("one", "Write format: 1"), ("true", "Write")]
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
