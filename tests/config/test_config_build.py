"""Units and sizes of what is built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import build_layer_model, build_machine, build_model, load_hardware, load_scenario
from jaxmoe.config.meshes import MeshConfig
from jaxmoe.hardware.mesh import link_ends
from jaxmoe.network import FewestHops, LowestHost


def test_a_platform_is_in_si_units(tree):
    machine = build_machine(load_hardware(tree / "hardware" / "mine.yaml"))
    np.testing.assert_allclose(machine.die.flops, np.full(6, 5e12), rtol=1e-6)
    np.testing.assert_allclose(machine.memory[0].bandwidth, np.full(6, 400e9), rtol=1e-6)
    np.testing.assert_allclose(machine.capacity, np.full(6, 8e9), rtol=1e-6)
    np.testing.assert_allclose(machine.topology.injection_bandwidth, np.full(6, 120e9), rtol=1e-6)
    assert machine.topology.ejection_bandwidth is None


def test_link_overrides_reach_the_link_they_name(tree):
    mesh = build_machine(load_hardware(tree / "hardware" / "mine.yaml")).topology
    ends = [tuple(pair) for pair in link_ends((2, 3)).tolist()]
    slow, late = ends.index((1, 2)), ends.index((3, 0))
    bandwidth, latency = np.full(len(ends), 50e9), np.full(len(ends), 100e-9)
    bandwidth[slow], latency[late] = 25e9, 300e-9
    np.testing.assert_allclose(mesh.link_bandwidth, bandwidth, rtol=1e-6)
    np.testing.assert_allclose(mesh.link_latency, latency, rtol=1e-6)


def test_limits_that_are_not_given_are_none(configs):
    machine = build_machine(load_hardware(configs / "hardware" / "nmp_4x4.yaml"))
    assert machine.memory == ()
    assert machine.capacity is None
    assert machine.topology.injection_bandwidth is None


def test_a_model_lists_its_layers(scenario_file):
    model = build_model(load_scenario(scenario_file).model)
    assert model.moe_layer_ids == (1, 3, 5)
    assert model.expert_parameters == 3 * 64 * 128


def test_costs_of_a_layer(scenario_file):
    model = build_layer_model(load_scenario(scenario_file), "sharded")
    assert float(model.message_bytes) == 64 * 2
    assert float(model.expert_bytes) == 3 * 64 * 128
    assert float(model.flops_per_token_expert) == 2 * 64 * 128
    assert (float(model.time_model.chunk_bytes), model.time_model.cut_through) == (0, True)
    assert isinstance(model.exchange, FewestHops)


def test_other_costs_of_a_layer(scenario_file):
    changes = [
        "costs.ffn_flops=6hi",
        "costs.gather=lowest_host",
        "hardware.router.chunk_B=512",
        "hardware.router.switching=store_and_forward",
    ]
    model = build_layer_model(load_scenario(scenario_file, changes), "replicated")
    assert float(model.flops_per_token_expert) == 6 * 64 * 128
    assert (float(model.time_model.chunk_bytes), model.time_model.cut_through) == (512, False)
    assert isinstance(model.exchange, LowestHost)


def test_every_number_is_float32(scenario_file):
    model = build_layer_model(load_scenario(scenario_file), "sharded")
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}


@given(
    sides=st.tuples(st.integers(1, 64), st.integers(2, 64)),
    compute=st.floats(1e-3, 1e6),
    bandwidth=st.floats(1e-3, 1e6),
    latency=st.floats(0, 1e6),
)
def test_any_sensible_machine_builds(sides, compute, bandwidth, latency):
    hardware = MeshConfig.model_validate(
        {
            "mesh_shape": list(sides),
            "die": {"compute_TFLOPs_per_s": compute},
            "link": {"bandwidth_GB_per_s": bandwidth, "latency_ns": latency},
        }
    )
    machine = build_machine(hardware)
    x, y = sides
    assert machine.topology.link_bandwidth.shape == (2 * ((x - 1) * y + x * (y - 1)),)
    assert float(machine.die.flops[0]) == pytest.approx(compute * 1e12, rel=1e-6)
    assert float(machine.topology.link_bandwidth[-1]) == pytest.approx(bandwidth * 1e9, rel=1e-6)
    assert float(machine.topology.link_latency[-1]) == pytest.approx(latency * 1e-9, rel=1e-6)
