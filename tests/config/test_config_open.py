"""A package of a user's own names a system, a topology and a kernel model in YAML, validated as those of jaxmoe are."""

import dataclasses
import pickle
import sys

import numpy as np
import pytest

from jaxmoe.config import ConfigError, Scenario, build_layer_model, commented, load_scenario, new_scenario, resolved
from jaxmoe.config.composition import composition, details, table
from jaxmoe.methods import METHODS, system_of
from jaxmoe.registry import PartError
from jaxmoe.settings import SettingError, setting, settings_of

MODULE = '''
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.engine import AbstractMethod, Decisions
from jaxmoe.errors import RuleError
from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.kernels import AbstractGemm
from jaxmoe.settings import setting
from jaxmoe.methods import AbstractSystem, system_of


@dataclass(frozen=True)
class Hottest(AbstractSystem):
    """The hottest experts are broadcast before every layer."""

    whole_experts = True
    goes = {"movement": "broadcasts of the hottest experts"}

    hottest: int = setting(3, help="the number of experts that are broadcast", at_least=1, part="movement", example=2)
    wait_us: float = setting(0.0, help="the time between two decisions", unit="us", at_least=0)
    mode: Literal["one", "two"] = "one"

    def check(self):
        if self.mode == "two" and self.hottest > 4:
            raise RuleError(("hottest",), self.hottest, "at most 4 with mode: two", "Lower it")

    def runs(self, given):
        return system_of("static").runs(given)


class Faded(AbstractMethod):
    """The plan with the weight of experts that were not chosen lately faded."""

    whole_experts = True
    takes_gate = True

    share: Float[Array, "layer expert node"]
    rate: Float[Array, ""] = setting(0.5, help="the weight of the latest step", at_least=0, at_most=1)

    def init(self, machine):
        return ()

    def step(self, machine, state, tokens, last):
        return state, Decisions(self.share)


class Loop(AbstractTopology):
    """A ring, by its links and paths alone."""

    nodes: int = setting(help="the number of nodes", at_least=2, example=4, static=True)
    twist: int = eqx.field(default=0, static=True)

    def __check_init__(self):
        if self.nodes % 2:
            raise ValueError(f"{self.nodes} nodes are odd")

    @property
    def link_ends(self):
        ahead = [(i, (i + 1) % self.nodes) for i in range(self.nodes)]
        return np.array(ahead + [(b, a) for a, b in ahead])

    def paths(self):
        count = self.nodes
        return [[tuple((a + k) % count for k in range((b - a) % count)) for b in range(count)] for a in range(count)]


class Hub(AbstractTopology):
    """Nodes around a switch: paths are short, however many."""

    nodes: int = setting(help="the number of nodes", at_least=2, static=True)

    @property
    def link_ends(self):
        out = [(i, self.nodes) for i in range(self.nodes)]
        return np.array(out + [(b, a) for a, b in out])

    def paths(self):
        count = self.nodes
        return [[(a, count + b) if a != b else () for b in range(count)] for a in range(count)]


class Slow(AbstractGemm):
    factor: Float[Array, ""] = setting(2.0, help="the time beside that at the full rate", above=0, example=2)

    def seconds(self, rows, part, present, flops, columns, gemms):
        return self.factor * rows * part / flops
'''
ENTRIES = """[jaxmoe.methods]
hottest = own_parts:Hottest
faded = own_parts:Faded
broken = own_parts:Missing
[jaxmoe.topologies]
loop = own_parts:Loop
hub = own_parts:Hub
[jaxmoe.kernel_models]
slow = own_parts:Slow
"""
LINK = "link: {bandwidth_GB_per_s: 5, latency_ns: 100}"
MACHINE = f"{{kind: loop, nodes: 4, {LINK}, die: {{compute_TFLOPs_per_s: 5, gemm: {{kind: slow, factor: 3}}}}}}"


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    folder = tmp_path / "installed"
    about = folder / "own_parts-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "own_parts.py").write_text(MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("own_parts", None)


def refused(scenario_file, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_scenario(scenario_file, overrides)
    return str(caught.value)


def test_all_three_are_named_in_a_scenario_and_made(scenario_file):
    given = ("strategies.hybrid_regions=2", f"hardware={MACHINE}", "system={name: hottest, wait_us: 2}")
    scenario = load_scenario(scenario_file, given)
    assert (scenario.system.hottest, scenario.system.wait_us, scenario.system.mode) == (3, 2.0, "one")
    assert (scenario.hardware.num_nodes, scenario.hardware.twist) == (4, 0)
    assert Scenario.model_validate(resolved(scenario)) == scenario
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    machine = build_layer_model(scenario, "sharded").machine
    assert machine.num_nodes == 4
    np.testing.assert_allclose(machine.topology.link_bandwidth, np.full(8, 5e9))
    np.testing.assert_allclose(machine.topology.link_latency, np.full(8, 1e-7))
    assert float(machine.die.gemm.factor) == 3
    section = scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    assert dataclasses.asdict(system) == {"hottest": 3, "wait_us": 2.0, "mode": "one"}


def test_a_number_of_a_topology_or_kernel_model_can_be_swept(scenario_file):
    import jax

    from jaxmoe.config import with_numbers

    scenario = load_scenario(scenario_file, ["strategies.hybrid_regions=2", f"hardware={MACHINE}"])

    def numbers(factor, bandwidth):
        changed = {"hardware.die.gemm.factor": factor, "hardware.link.bandwidth_GB_per_s": bandwidth}
        machine = build_layer_model(with_numbers(scenario, changed), "sharded").machine
        return machine.die.gemm.factor * machine.topology.link_bandwidth.sum()

    assert float(jax.jit(numbers)(2.0, 1.0)) == pytest.approx(2 * 8e9)
    assert float(jax.grad(numbers)(2.0, 1.0)) == pytest.approx(8e9)


SYSTEMS = {
    "{name: hottest, hottest: 0}": ["system.hottest is 0; expected at least 1", "the number of experts", "example 2"],
    "{name: hottest, hottest: 1.5}": ["system.hottest is 1.5; expected"],
    "{name: hottest, wait_us: -1}": ["system.wait_us is -1", "the time between two decisions in us"],
    "{name: hottest, hotest: 1}": ["system.hotest is not a known key", "Did you mean hottest?", "wait_us, mode"],
    "{name: hottest, mode: three}": ["system.mode is \"three\"; expected 'one' or 'two'"],
    "{name: hottest, mode: two, hottest: 9}": ["system.hottest is 9; expected at most 4 with mode: two. Lower it"],
    "{name: hottest, plan: tp}": ['system.plan is "tp"; expected whole experts', "with system hottest"],
    "{name: hottest, balancer: eplb}": ["system.balancer is a key of moentwine, not of hottest", "no balancer to name"],
    "{name: hottest, experts: 2}": ["is a key of hd_moe", "Its movement is named by system.hottest"],
    "{name: faded, rate: 2}": ["system.rate is 2; expected at most 1", "the weight of the latest step"],
    "{name: faded, share: 2}": ["system.share is not a known key", "Known here: name, plan, gate, rate."],
    "{name: faded, plan: tp}": ["expected whole experts, one node each, with system faded"],
    "{name: hotest}": ["system.name is \"hotest\"", "'expert_streaming', 'hottest', 'faded', 'broken'"],
    "{name: broken}": ["system.name is \"broken\"", "package own-parts cannot be imported"],
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_settings_of_a_system_are_checked_as_those_of_jaxmoe(scenario_file, system):
    said = refused(scenario_file, f"system={system}")
    assert [part for part in SYSTEMS[system] if part not in said] == [], said


def test_a_method_with_init_and_step_has_its_fields_as_settings_but_for_the_plan(scenario_file):
    section = load_scenario(scenario_file, ["system={name: faded, rate: 0.25, gate: {lambda_cost: 1}}"]).system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    assert (section.rate, section.gate.lambda_cost) == (0.25, 1)
    assert system.gate.lambda_cost == 1


def test_rules_of_the_scenario_hold_for_it_as_well(scenario_file):
    assert "without micro-batches" in refused(scenario_file, "system.name=hottest", "schedule=pipelined(2)")


MACHINES = {
    f"{{kind: loop, nodes: 1, {LINK}}}": ["hardware.nodes is 1; expected at least 2"],
    f"{{kind: loop, {LINK}}}": ["hardware.nodes is missing. Write the number of nodes, for example 4"],
    f"{{kind: loop, nods: 4, {LINK}}}": ["hardware.nods is not a known key", "Did you mean nodes?"],
    f"{{kind: loop, nodes: 3, {LINK}}}": ["hardware.kind is \"loop\"", "that make a network (3 nodes are odd)"],
    f"{{kind: hub, nodes: 600, {LINK}}}": ["at most 512 nodes in all (these are 600)"],
    "{kind: loop, nodes: 4}": ["hardware.link is missing"],
    "{kind: lop}": ["hardware.kind is \"lop\"; expected one of 'mesh'", "'graph', 'loop'"],
    MACHINE.replace("factor: 3", "factor: 0"): ["hardware.die.gemm.factor is 0; expected a number greater than 0"],
    MACHINE.replace("kind: slow", "kind: slo"): ["hardware.die.gemm.kind is \"slo\"", "'measured', 'fitted', 'slow'"],
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_settings_of_a_topology_and_a_kernel_model_are_checked(scenario_file, machine):
    said = refused(scenario_file, f"hardware={machine}")
    assert [part for part in MACHINES[machine] if part not in said] == [], said


def test_a_new_scenario_explains_its_settings_and_the_table_has_a_column(pytestconfig, monkeypatch, tmp_path):
    monkeypatch.chdir(pytestconfig.rootpath)
    made = new_scenario("mine", "moentwine_4x4", "tiny", None, "hottest", None)
    text = commented(made)
    assert "hottest: 3  # the number of experts that are broadcast" in text
    assert "wait_us: 0.0  # the time between two decisions in us" in text
    (tmp_path / "scenario.yaml").write_text(text)
    assert resolved(load_scenario(tmp_path / "scenario.yaml")) == resolved(made)
    assert composition("hottest")["movement"].keys == ("hottest",)
    assert "| part | `static` | `hottest` |" in table(["static", "hottest"])
    assert "`system.hottest`: broadcasts of the hottest experts." in details(["hottest"])
    assert "further settings: `system.wait_us`, `system.mode`" in details(["hottest"])


def test_names_of_this_package_stay_its_own():
    with pytest.raises(PartError, match="'static' is registered already"):
        METHODS.register("static", object)


@pytest.mark.parametrize(
    ("annotation", "told"),
    [(dict, "expected a type that YAML can hold"), (np.ndarray, "init=False"), (int | str, "expected a type")],
)
def test_a_field_that_is_no_setting_is_told(annotation, told):
    kind = dataclasses.make_dataclass("Odd", [("odd", annotation)])
    with pytest.raises(SettingError, match=rf"Odd.odd is .*{told}"):
        settings_of(kind)


def test_a_setting_is_described_by_its_help_unit_and_null():
    @dataclasses.dataclass
    class Some:
        room_MB: float | None = setting(None, help="the room", unit="MB", null="for all", above=0)  # noqa: N815
        pair: tuple[int, ...] = (1, 2)

    found = settings_of(Some)
    assert found["room_MB"].about.description == "the room in MB, or null for all"
    assert (found["pair"].default, found["pair"].type) == ((1, 2), tuple[int, ...])
