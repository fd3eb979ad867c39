"""Keys that are numbers of the model, against a trace of the whole run; and models at other numbers."""

import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import ConfigSource, build_layer_model, load_scenario_with, number_at, resolved, with_numbers
from jaxmoe.errors import InputError
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.parametric import parametric_run, structural_keys
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.tune.machine.model_numbers import StructuralNumberError, leaves_of, model_numbers

WHOLE = {"die": {"compute_TFLOPs_per_s": 1}, "link": {"bandwidth_GB_per_s": 10}}
TILED = {"kind": "tiled", "tile_tokens": 4, "tile_columns": 64, "startup_ns": 50}
LEVELS = [
    {"name": "hbm", "bandwidth_GB_per_s": 10, "nodes_per_channel": 2, "capacity_GB": 1},
    {"name": "ddr", "bandwidth_GB_per_s": 10, "capacity_GB": 5},
]
BUFFERS = {"num_vcs": 2, "vc_buf_size": 64, "switching": "cut_through", "flit_B": 16, "chunk_B": 64}
CASES = {
    "plain": {},
    "capacity": {"hardware.die.memory_capacity_GB": 1, "hardware.die.memory_bandwidth_GB_per_s": 100},
    "takes": {"hardware.die.energy_pJ_per_FLOP": 1, "hardware.die.area_mm2": 3, "hardware.link.price_per_GB_per_s": 2},
    "levels": {"hardware.memory": LEVELS},
    "tiles": {"hardware.die.gemm": TILED, "schedule": "pipelined(2)", "hardware.ports.injection_GB_per_s": 8},
    "buffers": {"hardware.router": BUFFERS},
    "links": {"hardware.links": [{"from": [0, 0], "to": [0, 1], "bandwidth_GB_per_s": 1, "one_way": False}]},
    "torus": {"hardware": {"kind": "torus", "mesh_shape": [2, 2], **WHOLE}},
    "switch": {"hardware": {"kind": "switch", "nodes": 4, **WHOLE}},
    "clusters": {
        "hardware": {"kind": "clusters", "clusters": 2, "nodes_per_cluster": 2, "uplink": WHOLE["link"], **WHOLE}
    },
    "wafers": {"hardware": {"kind": "wafers", "wafer_shape": [2, 1], "grid": [1, 2], "border": WHOLE["link"], **WHOLE}},
}
LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"


@pytest.fixture
def with_changes(kept_scenario: Path):
    return lambda changes: load_scenario_with(kept_scenario, changes, ConfigSource("a test", kept_scenario.parent))


def numeric_keys(node, prefix=""):
    """Dotted keys of all numbers of a resolved scenario; entries of lists go by name."""
    if isinstance(node, list):
        node = {entry["name"]: entry for entry in node if isinstance(entry, dict) and "name" in entry}
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from numeric_keys(inner, f"{prefix}.{key}".lstrip("."))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield prefix


def is_structural(scenario, key):
    """Whether trace, batches or placements depend on a number, or it cannot be traced through the whole run."""
    drawn = []

    def run(number):
        inputs = inputs_of(with_numbers(scenario, {key: number}))
        shares = [each.placement.share for each in standard_strategies(inputs)]
        drawn.extend(jax.tree.leaves((inputs.evaluation_batches, shares)))
        return jnp.zeros(())

    try:
        with warnings.catch_warnings(action="ignore"):
            jax.vmap(run)(jnp.full(2, number_at(scenario, key), jnp.float32))
    except (TypeError, OverflowError, InputError):
        return True
    return any(isinstance(leaf, jax.core.Tracer) for leaf in drawn)


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_declares_is_what_it_depends_on(with_changes, case):
    scenario = with_changes(CASES[case])
    keys = tuple(numeric_keys(resolved(scenario)))
    assert len(keys) > 50
    found = structural_keys(scenario, keys)
    counted = {"evaluation.iterations"}  # of systems, which are no part of this run
    assert {*found} == {key for key in keys if is_structural(scenario, key)} | counted
    assert all(found.values())


def test_numbers_are_addressed_by_the_leaves_that_they_change(with_changes):
    keys = (LINK, "hardware.die.memory_bandwidth_GB_per_s", "costs.bytes_per_element", "tuning.steps")
    run = parametric_run(with_changes({"hardware.die.memory_bandwidth_GB_per_s": 100}), keys, "3")
    assert run.keys == keys
    assert list(run.numbers.leaves.values()) == [
        (".machine.topology.link_bandwidth",),
        (".machine.memory[0].bandwidth",),
        (".costs.combine_bytes", ".costs.dispatch_bytes"),
        (),
    ]


def test_a_price_is_a_leaf_of_every_number_that_adds_to_it(with_changes):
    run = parametric_run(with_changes({"hardware.link.price_per_GB_per_s": 2}), (LINK, DIE), "3")
    assert ".machine.price" in run.numbers.leaves[LINK]
    assert ".machine.price" not in run.numbers.leaves[DIE]


def test_a_model_at_other_numbers_is_that_of_the_scenario_with_them(with_changes):
    run = parametric_run(with_changes({}), (LINK, DIE), "3")
    made = run.model(jnp.array([3.0, 0.5]), run.inputs.model)
    other = build_layer_model(with_changes({LINK: 3.0, DIE: 0.5}), "sharded")
    for found, expected in zip(jax.tree.leaves(made), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert made.costs.flops_per_token_expert is run.inputs.model.costs.flops_per_token_expert
    assert run.at(np.array([3.0, 0.5])).scenario.hardware.link.bandwidth_GB_per_s == 3


# Numbers of any model, without a configuration.


def test_numbers_of_a_model_made_in_code_have_slopes(with_changes):
    """Link rates by a factor, as a user of JAX would write it."""
    model = build_layer_model(with_changes({}), "sharded")

    def build(numbers):
        rate = model.machine.topology.link_bandwidth * numbers.get("factor", 1.0)
        return eqx.tree_at(lambda m: m.machine.topology.link_bandwidth, model, rate)

    made = model_numbers(build, {"factor": 1.0})
    assert made.leaves == {"factor": (".machine.topology.link_bandwidth",)}
    slope = jax.grad(lambda at: made.model(at, model).machine.topology.link_bandwidth.sum())(jnp.ones(1))
    assert slope[0] == pytest.approx(model.machine.topology.link_bandwidth.sum())


@pytest.mark.parametrize(
    "build",
    [
        lambda numbers: {"a": jnp.zeros(int(numbers.get("n", 3)))},
        lambda numbers: {"a": np.zeros(numbers.get("n", 3))},
        lambda numbers: {"a": 1.0 if numbers.get("n", 3) > 2 else 2.0},
        lambda numbers: jax.tree_util.Partial(int, float(numbers.get("n", 3))),
    ],
    ids=["size", "size for NumPy", "decision", "field"],
)
def test_what_gives_a_form_is_refused_by_name(build):
    with pytest.raises(StructuralNumberError, match="n is a size or a count, or something is decided by it"):
        leaves_of(build, "n", 3.0)


def test_any_other_error_is_that_of_the_model(with_changes):
    def build(numbers):
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        leaves_of(build, "n", 3.0)
