"""Space files that are read, and those that are refused before anything is computed."""

import pytest
import yaml

from jaxmoe.config import ConfigError
from jaxmoe.config.expressions import ExpressionError
from jaxmoe.config.hardware_space import read_constraint, read_space

KEY = "hardware.link.bandwidth_GB_per_s"


def test_a_constraint_has_two_sides():
    found = read_constraint(f"2 * {KEY} + 1 >= area / 3")
    assert (found.relation, found.left.keys, found.right.keys) == (">=", (KEY,), ("area",))
    assert found.right({"area": 6}) == 2


@pytest.mark.parametrize("text", ["a + 1", "a < 3", "1 <= a <= 3", "a <= 3 and b <= 3", "a <="])
def test_what_is_no_constraint_is_refused(text):
    with pytest.raises(ExpressionError):
        read_constraint(text)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"variables": {KEY: {"from": 5, "to": 5}}}, "to is 5.0; expected a number above from, 5"),
        ({"variables": {KEY: {"from": 50, "to": 5, "scale": "log"}}}, "expected a number above from, 50"),
        ({"variables": {KEY: {"from": 0, "to": 5, "scale": "log"}}}, "linear where an end is not above 0"),
        ({"variables": {KEY: {"from": 1, "to": 5, "points": 3}}}, "no points"),
        ({"variables": {}}, "variables"),
        ({"choices": {"hardware.mesh_shape": []}}, "at least one value"),
        ({"choices": {KEY: [1, 2]}}, "no key of variables or derived"),
        ({"constraints": [f"{KEY} < 3"]}, "no constraint"),
        ({"objective": "speed"}, "expected one of total, p95"),
        ({"derived": {"a": "b", "b": "a"}}, "no key that needs itself"),
        ({"derived": {KEY: "3"}}, "no key of variables"),
        ({"placement": "tuned", "objective": "compute"}, "an objective other than total and p95"),
        ({"start": 3}, "starts"),
    ],
)
def test_a_wrong_space_names_key_value_and_remedy(tmp_path, sections, told):
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({"variables": {KEY: {"from": 1, "to": 5}}} | sections))
    with pytest.raises(ConfigError) as error:
        read_space(path)
    assert told in str(error.value)
    assert "space.yaml" in str(error.value)
