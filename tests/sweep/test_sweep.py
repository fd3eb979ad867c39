"""Sweeps end to end: equal to evaluations of their points one by one, in groups that compile once."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow import dataset
from sweep_keys import CHUNK, DIE, LINK

from jaxmoe.config import ConfigError
from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.metrics import busy_by_kind
from jaxmoe.experiment.parametric import outcome_at, parametric_run
from jaxmoe.registry import METRICS
from jaxmoe.sweep import SweepError, compile_groups, evaluation
from jaxmoe.sweep.compile_groups import Group, groups_of
from jaxmoe.sweep.evaluation import SweepEvaluator, given, resources

LATENCY, MEMORY = "hardware.link.latency_ns", "hardware.die.memory_bandwidth_GB_per_s"
SHARED = [{"name": "hbm", "bandwidth_GB_per_s": 10, "nodes_per_channel": 2}]
TILED = {"kind": "tiled", "tile_tokens": 4, "tile_columns": 64, "startup_ns": 50}
NUMBERS = {LINK: [5, 20], DIE: {"from": 0.5, "to": 2, "points": 2}, LATENCY: [0, 100]}


def evaluated(space, point):
    """Metrics of a point as `jaxmoe evaluate` has them."""
    inputs = inputs_of(space.scenario(point.values), layers=space.study.layers)
    usual = {strategy.name: strategy for strategy in standard_strategies(inputs)}
    exchange = point.values["exchange"]
    times = score(
        inputs, usual[point.values["strategy"]], inputs.evaluation_batches, None if exchange == "own" else exchange
    )
    busy = np.concatenate(
        [
            np.sum([stage[kind].mean(axis=0) for stage in times.busy.values() if kind in stage], axis=0)
            for kind in ("link", "node", "port")
        ]
    )
    stages = {name: times.stages[name].mean() for name in ("dispatch", "compute", "combine")}
    return {
        "total_s": times.mean.mean(),
        "p95_s": times.p95.mean(),
        "dispatch_s": stages["dispatch"],
        "compute_s": stages["compute"],
        "combine_s": stages["combine"],
        "utilisation": times.node_time.mean() / times.total.mean(),
        "communication_share": (stages["dispatch"] + stages["combine"]) / sum(stages.values()),
        "busiest_s": busy.max(),
    }


@pytest.mark.parametrize(
    ("changes", "strategies"),
    [
        ({}, ["tp", "ep_balanced", "hybrid_complete"]),
        ({"schedule": "pipelined(2)", "hardware.router.switching": "cut_through"}, ["ep"]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ({"schedule": "overlap", "hardware.ports.injection_GB_per_s": 8}, ["tp_both_ways"]),
                ({"hardware.die.gemm": TILED}, ["hybrid"]),
                (
                    {"hardware.memory": SHARED},
                    ["ep_random"],
                ),
                (
                    {"hardware.links": [{"from": [0, 0], "to": [0, 1], "bandwidth_GB_per_s": 1, "one_way": False}]},
                    ["ep"],
                ),
            )
        ),
    ],
    ids=["plain", "pipelined", "ports", "tiles", "channels", "links"],
)
def test_equal_to_evaluation_one_by_one(space, sweep, changes, strategies):
    sections = {"axes": NUMBERS | {"strategy": strategies}, "set": changes}
    done, made = sweep(**sections), space(**sections)
    assert done.groups == len(strategies)
    assert done.compiles <= done.groups
    for point, row in list(zip(done.points, done.rows, strict=True))[:: max(len(done.points) // 6, 1)]:
        expected = evaluated(made, point)
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    "hardware",
    [
        pytest.param({"kind": "torus", "mesh_shape": [2, 2]}, marks=pytest.mark.slow),
        pytest.param({"kind": "switch", "nodes": 4}, marks=pytest.mark.slow),
        {"kind": "clusters", "clusters": 2, "nodes_per_cluster": 2, "uplink": {"bandwidth_GB_per_s": 3}},
        pytest.param(
            {"kind": "wafers", "wafer_shape": [2, 1], "grid": [1, 2], "border": {"bandwidth_GB_per_s": 3}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torus", "switch", "clusters", "wafers"],
)
def test_numbers_are_numbers_on_every_network(space, sweep, hardware):
    whole = hardware | {"die": {"compute_TFLOPs_per_s": 1}, "link": {"bandwidth_GB_per_s": 10}}
    sections = {"axes": {"hardware": [whole], **NUMBERS}}
    done, made = sweep(**sections), space(**sections)
    assert done.groups == 1
    for at in (0, 5):
        assert done.rows[at]["total_s"] == pytest.approx(evaluated(made, done.points[at])["total_s"], rel=2e-5)


def test_by_hand(sweep):
    """Tensor parallelism computes 8 tokens x 2 experts x 6 x 64 x 128 FLOPs on four nodes."""
    done = sweep(axes={DIE: [1, 2, 4], "strategy": ["tp"]})
    for row, rate in zip(done.rows, (1e12, 2e12, 4e12), strict=True):
        assert row["compute_s"] == pytest.approx(8 * 2 * 6 * 64 * 128 / 4 / rate, rel=1e-5)
    assert done.best("total")["hash"] == done.points[2].hash
    assert done.best("utilisation")["hash"] == done.points[0].hash


def test_what_decides_or_sizes_something_makes_groups(space):
    made = space(
        axes={
            LINK: [1, 2],
            CHUNK: [32, 64],
            "workload.batch_tokens": [4, 8],
            "workload.trace.skew": [0.1, 0.9],
            MEMORY: [None, 100, 200],
            "evaluation.seed": [1],
        }
    )
    groups = [*groups_of(made, made.points(), lambda done, total: None)]
    assert all(isinstance(group, Group) for group in groups)
    assert len(groups) == 2 * 2 * 2  # tokens, skew, whether memory has a limit
    kinds = {group.run.keys for group in groups}
    assert kinds == {(LINK, CHUNK), (LINK, CHUNK, MEMORY)}


def test_settings_are_drawn_as_they_are_needed(space, monkeypatch):
    """Three settings, of two strategies each."""
    drawn = []

    def counted(scenario, keys, layers):
        drawn.append(scenario.workload.batch_tokens)
        return parametric_run(scenario, keys, layers)

    monkeypatch.setattr(compile_groups, "parametric_run", counted)
    made = space(axes={"workload.batch_tokens": [8, 4, 2], LINK: [1, 2], "strategy": ["tp", "ep"]})
    ahead = []
    for group in groups_of(made, made.points(), lambda done, total: None):
        ahead.append((group.points[0].values["workload.batch_tokens"], list(dict.fromkeys(drawn))))
    assert [(tokens, len(seen)) for tokens, seen in ahead] == [(8, 1), (8, 1), (4, 2), (4, 2), (2, 3), (2, 3)]


def test_memory_capacity_decides_what_fits(sweep):
    done = sweep(axes={"hardware.die.memory_capacity_GB": [1e-4, 1], LINK: [1, 2], "strategy": ["ep_balanced"]})
    assert done.groups == 2
    assert [row["comparable"] for row in done.rows] == [False, False, True, True]
    assert "does not fit" in done.rows[0]["note"]
    assert done.best("total")["hardware.die.memory_capacity_GB"] == 1


@pytest.mark.slow
def test_machines_models_and_schedules_by_name(configs, sweep):
    done = sweep(
        scenario=str(configs / "scenarios" / "quickstart.yaml"),
        layers=[0],
        set={"workload.trace.tokens": 256, "evaluation.batches": 2, "workload.batch_tokens": 8},
        axes={
            "hardware": ["nmp_4x4", "nvl72"],
            "schedule": ["serial", "pipelined(2)"],
            "strategies.hybrid_regions": [4],
        },
    )
    assert done.groups == 4
    assert all(row["total_s"] > 0 for row in done.rows)


@pytest.mark.slow
def test_a_case_that_cannot_be_has_a_reason(sweep):
    whole = {"die": {"compute_TFLOPs_per_s": 1}, "link": {"bandwidth_GB_per_s": 10}}
    machines = [{"mesh_shape": [2, 2], **whole}, {"kind": "switch", "nodes": 4, **whole}]
    done = sweep(axes={"hardware": machines, "exchange": ["own", "least_loaded_split_tree", "rings_1x2"]})
    told = [row["note"] for row in done.rows]
    assert [row["total_s"] is None for row in done.rows] == [False, False, False, False, True, True]
    assert "needs a mesh" in told[4]
    assert "use rings_2" in told[5]
    assert any(note.startswith("1 point: ") and "needs a mesh" in note for note in done.notes)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"hardware.link.bandwith_GB_per_s": [1, 2]}, "Did you mean bandwidth_GB_per_s?"),
        ({"hardware.linc.bandwidth_GB_per_s": [1, 2]}, "Did you mean link?"),
        ({LINK: [1, -2, 3]}, "expected a number greater than 0"),
        ({LINK: [1, "fast"]}, "expected a number"),
        ({CHUNK: [64, 100.5, 128]}, CHUNK),
        ({"total": [1, 2]}, "total is not a known key"),
    ],
)
def test_a_bad_axis_is_one_clear_error_and_writes_nothing(sweep, tmp_path, axes, told):
    with pytest.raises((ConfigError, SweepError)) as error:
        sweep(axes=axes)
    assert told in str(error.value)
    assert not list((tmp_path / "out").iterdir())


# Chunks: sizes that respect the limit, and all devices.


def test_chunks_of_any_size_give_the_same(space):
    made = space(axes={LINK: {"from": 1, "to": 50, "points": 37}, "strategy": ["ep_balanced"]})
    (group,) = groups_of(made, made.points(), lambda done, total: None)
    whole, small = SweepEvaluator(), SweepEvaluator(most=10)
    (one,) = [measured for _, measured in whole.chunks(group)]
    parts = [(part, measured) for part, measured in small.chunks(group)]
    assert [part.stop - part.start for part, _ in parts] == [10, 10, 10, 7]
    assert whole.compiles == small.compiles == 1
    np.testing.assert_allclose(np.concatenate([m.metrics for _, m in parts]), one.metrics, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([m.busiest for _, m in parts]), one.busiest)


def test_a_small_group_makes_no_small_chunks_of_a_large_one(space):
    made = space(
        axes={"strategy": ["ep_random", "ep_balanced", "ep"], LINK: {"from": 1, "to": 60, "points": 60}},
        where=[f"strategy != 'ep_random' or {LINK} < 3"],
    )
    engine = SweepEvaluator()
    groups = [*groups_of(made, made.points(), lambda done, total: None)]
    assert [len(group.points) for group in groups] == [2, 60, 60]
    assert [len([*engine.chunks(group)]) for group in groups] == [1, 1, 1]
    assert engine.compiles == 2


@pytest.mark.slow
def test_a_memory_limit_makes_chunks_smaller(space):
    made = space(axes={LINK: {"from": 1, "to": 50, "points": 200}, "strategy": ["ep_balanced"]})
    (group,) = groups_of(made, made.points(), lambda done, total: None)
    free = SweepEvaluator()
    _, taken = free._compile(group.run, given(group), 200)
    tight = SweepEvaluator(memory_bytes=taken / 3)
    sizes = {part.stop - part.start for part, _ in tight.chunks(group)}
    assert max(sizes) <= 80
    assert tight.too_large >= 1
    _, least = tight._compile(group.run, given(group), max(sizes))
    assert least <= taken / 3


def test_points_in_blocks_are_those_at_once(space, monkeypatch):
    made = space(axes={LINK: {"from": 1, "to": 50, "points": 12}, "strategy": ["ep_balanced"]})
    (group,) = groups_of(made, made.points(), lambda done, total: None)
    ((_, at_once),) = SweepEvaluator().chunks(group)
    monkeypatch.setattr(evaluation, "TOGETHER", 4)
    ((_, in_blocks),) = SweepEvaluator().chunks(group)
    assert len(np.unique(at_once.metrics[:, 0])) == 12
    np.testing.assert_allclose(in_blocks.metrics, at_once.metrics, rtol=1e-6)


def test_rings_of_all_kinds_are_compiled_once(sweep):
    done = sweep(axes={LINK: [1, 2], "strategy": ["tp", "tp_both_ways", "hybrid_complete"]})
    assert (done.groups, done.compiles) == (3, 1)


def test_the_busiest_resource_is_named(sweep):
    slow, fast = sweep(axes={LINK: [0.001, 1e6], "strategy": ["ep_balanced"]}).rows
    assert (slow["busiest_kind"], fast["busiest_kind"]) == ("link", "compute")
    (narrow,) = sweep(axes={"hardware.ports.ejection_GB_per_s": [0.001], "strategy": ["ep_balanced"]}).rows
    assert narrow["busiest_kind"] == "port"
    assert narrow["busiest_index"] in range(4)


@pytest.mark.parametrize("ports", [{}, {"injection_GB_per_s": 1, "ejection_GB_per_s": 2}])
def test_resources_are_counted_as_the_model_has_them(space, ports):
    made = space(axes={LINK: [1]}, set={"hardware.ports": ports})
    (group,) = groups_of(made, made.points(), lambda done, total: None)
    busy = busy_by_kind(outcome_at(group.run, jnp.ones(1, jnp.float32), given(group)).times)
    assert resources(group.run) == [(kind, at) for kind, seconds in busy.items() for at in range(len(seconds))]


SCRIPT = """
import sys, jax
from pathlib import Path
from jaxmoe.sweep import read_study, run_sweep
done = run_sweep(read_study(Path(sys.argv[1])), Path(sys.argv[2]), lambda done, total: None)
assert done.devices == len(jax.devices()) == 8, done.devices
"""


@pytest.mark.slow
def test_eight_devices_give_the_same(study, sweep, tmp_path):
    axes = {"axes": NUMBERS | {CHUNK: [32, 48, 64], "strategy": ["tp", "ep_balanced"]}}
    one = sweep(**axes)
    folder = tmp_path / "eight"
    folder.mkdir()
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    path = Path(study(**axes))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(folder)], env=os.environ | flags, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = {row["hash"]: row for row in dataset.dataset(folder / "points").to_table().to_pylist()}
    assert len(rows) == len(one.rows)
    for row in one.rows:
        for metric in METRICS.values():
            found, expected = rows[row["hash"]][metric.column], row[metric.column]
            assert found is None if expected is None else found == pytest.approx(expected, rel=1e-6)
