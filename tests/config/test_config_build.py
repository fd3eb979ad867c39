"""Units and sizes of what is built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError, build_layer_model, build_machine, build_model, load_hardware, load_scenario
from jaxmoe.config.networks import MeshConfig
from jaxmoe.engine import Pipelined, Serial
from jaxmoe.hardware.networks import link_ends
from jaxmoe.network import GatherExchange, RingExchange


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


def test_single_dies_have_numbers_of_their_own(tree):
    own = [
        "dies=[{nodes: [1, 4], compute_TFLOPs_per_s: 2.5, memory_capacity_GB: 4}, {nodes: [0], memory_capacity_GB: 16}]"
    ]
    machine = build_machine(load_hardware(tree / "hardware" / "mine.yaml", own))
    np.testing.assert_allclose(machine.die.flops, [5e12, 2.5e12, 5e12, 5e12, 2.5e12, 5e12], rtol=1e-6)
    np.testing.assert_allclose(machine.capacity, [16e9, 4e9, 8e9, 8e9, 4e9, 8e9], rtol=1e-6)
    np.testing.assert_allclose(machine.memory[0].bandwidth, np.full(6, 400e9), rtol=1e-6)


def test_dies_of_a_row_or_a_column_follow_the_mesh(tree):
    def flops(shape: str, line: str) -> list:
        settings = [f"mesh_shape={shape}", f"dies=[{{{line}, compute_TFLOPs_per_s: 2.5}}]", "links=[]"]
        machine = build_machine(load_hardware(tree / "hardware" / "mine.yaml", settings))
        return (np.asarray(machine.die.flops) / 1e12).round(3).tolist()

    assert flops("[2, 3]", "row: 1") == [5, 5, 5, 2.5, 2.5, 2.5]
    assert flops("[3, 2]", "row: 1") == [5, 5, 2.5, 2.5, 5, 5]
    assert flops("[2, 3]", "column: 1") == [5, 2.5, 5, 5, 2.5, 5]


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
    assert float(model.costs.dispatch_bytes) == float(model.costs.combine_bytes) == 64 * 2
    assert float(model.costs.expert_bytes) == 3 * 64 * 128
    assert float(model.costs.flops_per_token_expert) == 2 * 64 * 128
    assert (float(model.costs.columns), float(model.costs.gemms)) == (128, 1)
    assert (float(model.time_model.chunk_bytes), model.time_model.cut_through) == (0, True)
    assert isinstance(model.exchange, GatherExchange)
    assert model.exchange.description.name == "fewest_hops"
    assert isinstance(model.schedule, Serial)


def test_other_costs_of_a_layer(scenario_file):
    changes = [
        "costs.ffn_flops=6hi",
        "costs.exchange=ring_both_ways",
        "costs.dispatch_bytes_per_element=1",
        "costs.combine_bytes_per_element=3",
        "costs.metadata_bytes_per_choice=6",
        "schedule=pipelined(3)",
        "hardware.router.chunk_B=512",
        "hardware.router.switching=store_and_forward",
    ]
    model = build_layer_model(load_scenario(scenario_file, changes), "replicated")
    assert float(model.costs.flops_per_token_expert) == 6 * 64 * 128
    # Two choices of a token carry six bytes each, on the way to the experts alone.
    assert (float(model.costs.dispatch_bytes), float(model.costs.combine_bytes)) == (64 + 12, 64 * 3)
    assert (float(model.time_model.chunk_bytes), model.time_model.cut_through) == (512, False)
    assert isinstance(model.exchange, RingExchange)
    assert model.exchange.both_ways
    assert isinstance(model.schedule, Pipelined)
    assert model.schedule.micro_batches == 3


def test_deciding_is_free_unless_its_costs_are_stated(scenario_file):
    assert build_layer_model(load_scenario(scenario_file), "sharded").costs.deciding is None
    stated = load_scenario(scenario_file, ["costs.deciding={ns_per_choice: 20, B_per_token: 16}"])
    deciding = build_layer_model(stated, "sharded").costs.deciding
    np.testing.assert_allclose([deciding.choice_seconds, deciding.told_bytes], [20e-9, 16], rtol=1e-6)


def test_every_number_is_float32(scenario_file):
    model = build_layer_model(load_scenario(scenario_file), "sharded")
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32"), jnp.dtype("int32")}


LEVELS = (
    "hardware.die.memory_bandwidth_GB_per_s=null",
    "hardware.die.memory_capacity_GB=null",
    "hardware.memory=[{name: cache, bandwidth_GB_per_s: 900, capacity_GB: 1}, "
    "{name: ddr, bandwidth_GB_per_s: 40, latency_ns: 80, capacity_GB: 12, nodes_per_channel: 3}]",
)


def test_memory_levels_have_channels_that_successive_nodes_share(scenario_file):
    near, far = build_machine(load_scenario(scenario_file, LEVELS).hardware).memory
    assert (near.name, far.name) == ("cache", "ddr")
    np.testing.assert_allclose(near.bandwidth, np.full(6, 900e9), rtol=1e-6)
    np.testing.assert_allclose(near.latency, np.zeros(6))
    np.testing.assert_allclose(far.bandwidth, np.full(2, 40e9), rtol=1e-6)
    np.testing.assert_allclose(far.latency, np.full(2, 80e-9), rtol=1e-6)
    assert far.channel.tolist() == [0, 0, 0, 1, 1, 1]


def test_weights_have_to_fit_an_even_part_of_the_last_level(scenario_file):
    machine = build_machine(load_scenario(scenario_file, LEVELS).hardware)
    np.testing.assert_allclose(machine.capacity, np.full(6, 4e9), rtol=1e-6)


def test_tiles_are_in_si_units(scenario_file):
    tiles = "hardware.die.gemm={kind: tiled, tile_tokens: 16, tile_columns: 32, startup_ns: 500}"
    gemm = build_machine(load_scenario(scenario_file, [tiles]).hardware).die.gemm
    assert (float(gemm.tile_rows), float(gemm.tile_columns)) == (16, 32)
    assert float(gemm.startup) == pytest.approx(500e-9)


def measured(tree, tokens, columns):
    """A machine whose products were measured up to so many tokens and columns; the table lies beside it."""
    points = [f"{t},{c},{t * c * 1e-9}" for t in (1, tokens) for c in (1, columns)]
    (tree / "hardware" / "times.csv").write_text("\n".join(["tokens,columns,seconds", *points]))
    machine = tree / "hardware" / "mine.yaml"
    machine.write_text(machine.read_text().replace("{compute", "{gemm: {kind: measured, path: times.csv}, compute"))


def test_measured_products_are_read_beside_the_file_that_names_them(tree, scenario_file):
    measured(tree, tokens=32, columns=128)
    gemm = build_layer_model(load_scenario(scenario_file), "sharded").machine.die.gemm
    np.testing.assert_allclose(gemm.table, [[1e-9, 128e-9], [32e-9, 32 * 128e-9]], rtol=1e-6)
    alone = load_hardware(tree / "hardware" / "mine.yaml")
    assert alone.die.gemm.path == str(tree / "hardware" / "times.csv")


@pytest.mark.parametrize(
    ("tokens", "columns", "expected"),
    [(31, 128, ["31 tokens", "up to 32"]), (32, 127, ["127 columns", "up to 128"])],
)
def test_measured_products_have_to_reach_the_batch_and_the_expert(tree, scenario_file, tokens, columns, expected):
    measured(tree, tokens, columns)
    with pytest.raises(ConfigError) as caught:
        build_layer_model(load_scenario(scenario_file), "sharded")
    assert all(text in str(caught.value) for text in ["hardware.die.gemm.path", "times.csv", *expected])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("costs.exchange=rings_4", ["costs.exchange is 'rings_4'", "equal groups of 6 nodes", "use one of 1, 2, 3, 6"]),
        ("costs.exchange=rings_3x1", ["costs.exchange is 'rings_3x1'", "2x3 mesh", "cut x into one of 1, 2"]),
        ("tuning.exchanges=[rings, rings_4]", ["tuning.exchanges is 'rings_4'", "use one of 1, 2, 3, 6"]),
    ],
)
def test_an_exchange_has_to_suit_the_machine(scenario_file, override, expected):
    with pytest.raises(ConfigError) as caught:
        build_layer_model(load_scenario(scenario_file, [override]), "sharded")
    assert all(text in str(caught.value) for text in expected)


def test_trees_both_ways_need_a_mesh(scenario_file):
    other = "hardware={kind: switch, nodes: 6, link: {bandwidth_GB_per_s: 9}, die: {compute_TFLOPs_per_s: 1}}"
    build_layer_model(load_scenario(scenario_file, [other]), "sharded")  # though by default plans may have them
    with pytest.raises(ConfigError, match=r"costs.exchange is 'fewest_hops_cross_tree'.* use fewest_hops_tree"):
        build_layer_model(load_scenario(scenario_file, [other, "costs.exchange=fewest_hops_cross_tree"]), "sharded")


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
    assert float(np.asarray(machine.die.flops)[0]) == pytest.approx(compute * 1e12, rel=1e-6)
    assert float(np.asarray(machine.topology.link_bandwidth)[-1]) == pytest.approx(bandwidth * 1e9, rel=1e-6)
    assert float(np.asarray(machine.topology.link_latency)[-1]) == pytest.approx(latency * 1e-9, rel=1e-6)
