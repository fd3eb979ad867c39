"""What `--set` does, and that whatever is typed there ends in a scenario or in a clear error."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.config import ConfigError, TuningConfig, load_hardware, load_scenario


def test_an_override_reaches_into_a_referenced_file(scenario_file):
    scenario = load_scenario(scenario_file, ["hardware.die.compute_TFLOPs_per_s=10"])
    assert scenario.hardware.die.compute_TFLOPs_per_s == 10
    assert scenario.hardware.link.bandwidth_GB_per_s == 50


def test_an_override_makes_sections_that_are_not_there(scenario_file):
    scenario = load_scenario(scenario_file, ["tuning.max_temperature.start=0.2"])
    assert scenario.tuning.max_temperature.start == 0.2
    assert scenario.tuning.max_temperature.stop == TuningConfig().max_temperature.stop
    assert scenario.tuning.steps == TuningConfig().steps


def test_an_override_fills_a_section_that_is_left_empty(scenario_file):
    scenario_file.write_text(scenario_file.read_text() + "tuning:\n")
    assert load_scenario(scenario_file, ["tuning.steps=7"]).tuning.steps == 7


@pytest.mark.parametrize("swap", [False, True])
def test_a_reference_is_replaced_before_it_is_changed(tree, scenario_file, swap):
    (tree / "hardware" / "big.yaml").write_text(
        "mesh_shape: [6, 6]\ndie: {compute_TFLOPs_per_s: 9}\nlink: {bandwidth_GB_per_s: 9}\n"
    )
    overrides = ["hardware=big", "hardware.link.bandwidth_GB_per_s=75"]
    hardware = load_scenario(scenario_file, overrides[::-1] if swap else overrides).hardware
    assert (hardware.name, hardware.mesh_shape, hardware.link.bandwidth_GB_per_s) == ("big", (6, 6), 75)


def test_equal_keys_apply_in_the_order_given(scenario_file):
    assert load_scenario(scenario_file, ["seed=1", "seed=2"]).seed == 2


def test_the_value_is_yaml(scenario_file):
    overrides = [
        "hardware.mesh_shape=[3, 4]",
        "hardware.links=[]",
        "tuning.learning_rate=1e-3",
        "tuning.time_limit_s=null",
    ]
    scenario = load_scenario(scenario_file, overrides)
    assert scenario.hardware.mesh_shape == (3, 4)
    assert scenario.hardware.links == ()
    assert scenario.tuning.learning_rate == 0.001
    assert scenario.tuning.time_limit_s is None


def test_the_value_may_hold_an_equals_sign(scenario_file):
    assert load_scenario(scenario_file, ["name=a=b"]).name == "a=b"


def test_a_part_may_be_replaced_by_a_mapping(scenario_file):
    scenario = load_scenario(scenario_file, ["workload={batch_tokens: 16}"])
    assert (scenario.workload.batch_tokens, scenario.workload.trace.tokens) == (16, 8192)


def test_a_mapping_that_yaml_shares_changes_in_one_place(scenario_file):
    shared = "tuning: {sinkhorn_temperature: &both {start: 1.0, stop: 0.5}, support_width: *both}\n"
    scenario_file.write_text(scenario_file.read_text() + shared)
    tuning = load_scenario(scenario_file, ["tuning.support_width.stop=0.2"]).tuning
    assert (tuning.sinkhorn_temperature.stop, tuning.support_width.stop) == (0.5, 0.2)


def test_hardware_alone_takes_overrides_from_its_own_top(tree):
    hardware = load_hardware(tree / "hardware" / "mine.yaml", ["link.latency_ns=5"])
    assert (hardware.name, hardware.link.latency_ns) == ("mine", 5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.floats(1e-6, 1e9))
def test_numbers_survive_the_way_through_text(scenario_file, value):
    scenario = load_scenario(scenario_file, [f"hardware.link.bandwidth_GB_per_s={value!r}"])
    assert scenario.hardware.link.bandwidth_GB_per_s == value


KEYS = [
    "hardware",
    "model",
    "link",
    "die",
    "mesh_shape",
    "links",
    "workload",
    "trace",
    "kind",
    "tuning",
    "costs",
    "0",
    "x",
]
VALUES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["{}", "[]", "null", "true", "-1", "{kind: file}", "[{from: [0, 0]}]", ".inf", "1e99", "!!int x"]),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.sampled_from(KEYS), max_size=4), value=VALUES)
def test_nothing_that_is_typed_ends_in_another_error(scenario_file, keys, value):
    with contextlib.suppress(ConfigError):
        load_scenario(scenario_file, [f"{'.'.join(keys)}={value}"])
