"""What combines with what: the table is that of the schema, its values load, the rest is refused with the reason."""

from typing import Literal, get_args, get_origin

import pytest

from jaxmoe.config import ConfigError, Scenario, load_scenario
from jaxmoe.config.composition import COMPOSITION, DIVIDING, WHOLE_EXPERTS, details, table
from jaxmoe.config.systems import SystemConfig
from jaxmoe.engine.schedule import SCHEDULES
from jaxmoe.methods.settings import METHODS, PARTS
from jaxmoe.registry import STRATEGIES

SECTIONS = SystemConfig.known
CELLS = [(system, part) for system, parts in COMPOSITION.items() for part in parts]


def between(text: str, name: str) -> str:
    """What a page has between the markers of this name."""
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0].strip()


def test_every_system_has_every_part_once():
    assert [*COMPOSITION] == [*METHODS]
    assert all([*parts] == [*PARTS] for parts in COMPOSITION.values())
    assert all(bool(part.keys) != bool(part.why_not) for parts in COMPOSITION.values() for part in parts.values())


@pytest.mark.parametrize("system", COMPOSITION)
def test_every_key_of_a_system_names_a_part(system):
    """A key that is added to the schema has to be told of."""
    keys = [key for part in COMPOSITION[system].values() for key in part.keys]
    own = [key for key in keys if "." not in key and key != "schedule"]
    fields = set(SECTIONS[system].model_fields) - {"name"}
    assert sorted(own) == sorted(fields - (set() if SECTIONS[system].statement.plan else {"plan"}))
    assert {key.split(".")[0] for key in keys} - fields <= Scenario.model_fields.keys()


def test_strategies_are_those_that_can_be_named():
    assert {*WHOLE_EXPERTS, *DIVIDING} == {*STRATEGIES}


def test_the_pages_have_the_table_of_the_code(pytestconfig):
    root = pytestconfig.rootpath
    assert between((root / "README.md").read_text(), "what combines with what") == table()
    assert between((root / "configs" / "README.md").read_text(), "parts of systems") == details()


@pytest.mark.parametrize("system", COMPOSITION)
def test_every_value_that_the_table_offers_loads(scenario, system):
    for part in COMPOSITION[system].values():
        for key in part.keys:
            field = SECTIONS[system].model_fields.get(key)
            values = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
            for value in values:
                alone = ("system.balancer=none",) if str(value).endswith("esp") else ()
                given = (f"system.name={system}", f"system.{key}={value}", *alone)
                assert getattr(load_scenario(scenario, given).system, key) == value


def test_every_schedule_that_the_table_offers_loads(scenario):
    offered = {"any": {*SCHEDULES}, "any without micro-batches": {*SCHEDULES} - {"pipelined(m)"}}
    for system, parts in COMPOSITION.items():
        allowed = offered[parts["schedule"].goes.partition(",")[0]] if parts["schedule"].keys else {"serial"}
        for name in SCHEDULES:
            given = (f"system.name={system}", f"schedule={name.replace('(m)', '(2)')}")
            if name in allowed:
                load_scenario(scenario, given)
            else:
                with pytest.raises(ConfigError, match=rf"schedule is .* with system {system}"):
                    load_scenario(scenario, given)


@pytest.mark.parametrize(("system", "part"), [cell for cell in CELLS if cell[1] != "schedule"])
def test_a_part_of_other_systems_is_refused_with_the_reason(scenario, system, part):
    own = COMPOSITION[system][part]
    others = {key for parts in COMPOSITION.values() for key in parts[part].keys if "." not in key and key != "plan"}
    for key in sorted(others - SECTIONS[system].model_fields.keys()):
        with pytest.raises(ConfigError) as caught:
            load_scenario(scenario, (f"system.name={system}", f"system.{key}=1"))
        shared = key == "rate"  # of a forecast for movement, and of one for the balancer
        reason = "" if shared else own.why_not or ", ".join(own.paths)
        for told in (f"system.{key} is a key of", f"not of {system}", reason, "Remove it"):
            assert told in str(caught.value)


@pytest.mark.parametrize("system", [name for name, parts in COMPOSITION.items() if "whole" in parts["placement"].goes])
def test_a_plan_that_divides_experts_is_refused_where_they_are_whole(scenario, system):
    for plan in (*WHOLE_EXPERTS, *DIVIDING):
        given = (f"system.name={system}", f"system.plan={plan}")
        if plan in DIVIDING:
            with pytest.raises(ConfigError, match=rf"system.plan is .* expected whole experts.* with system {system}"):
                load_scenario(scenario, given)
        else:
            load_scenario(scenario, given)
    # As many groups as nodes leave experts whole.
    load_scenario(scenario, (f"system.name={system}", "system.plan=hybrid", "strategies.hybrid_regions=4"))


def test_layouts_that_slice_experts_take_any_plan_and_no_balancer(scenario):
    sliced = ("system.name=moentwine", "system.layout=esp")
    load_scenario(scenario, (*sliced, "system.balancer=none", "system.plan=tp"))
    with pytest.raises(ConfigError, match=r"system.balancer is .*topology_aware.* leaves nothing to balance"):
        load_scenario(scenario, sliced)


@pytest.mark.parametrize("kind", ["torus", "ring", "switch", "fully_connected", "clusters"])
def test_token_layouts_go_with_networks_that_have_them(scenario, kind):
    sizes = {"torus": "mesh_shape: [2, 2]", "clusters": "clusters: 2, nodes_per_cluster: 2"}.get(kind, "nodes: 4")
    link = "link: {bandwidth_GB_per_s: 10}" + (", uplink: {bandwidth_GB_per_s: 5}" if kind == "clusters" else "")
    hardware = f"hardware={{kind: {kind}, {sizes}, {link}, die: {{compute_TFLOPs_per_s: 1}}}}"
    for system in COMPOSITION:
        given = (hardware, f"system={{name: {system}}}")
        if system == "moentwine" and kind not in ("switch", "clusters"):
            with pytest.raises(ConfigError, match=rf"system.name is .*expected a system for a {kind}"):
                load_scenario(scenario, given)
        else:
            load_scenario(scenario, given)
    if kind in ("switch", "clusters"):
        with pytest.raises(ConfigError, match=rf"system.layout is .*no layout on a {kind}"):
            load_scenario(scenario, (hardware, "system={name: moentwine, layout: her}"))
