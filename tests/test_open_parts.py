"""A package of a user's own adds a part of every kind by entry points alone; jaxmoe prices, tunes and replays them."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxmoe as jm
from jaxmoe.cli.app import app
from jaxmoe.config import build_layer_model, load_scenario, with_numbers
from jaxmoe.methods import METHODS
from jaxmoe.registry import KERNEL_MODELS, STRATEGIES
from jaxmoe.testing import Report, check_exchange, check_kernel_model, check_method, check_strategy, check_topology

PACKAGE = Path(__file__).parent / "own_package"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A scenario that names the parts of an installed package."""
    folder = tmp_path_factory.mktemp("installed")
    about = folder / "my_lab-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 1.0\n")
    shutil.copy(PACKAGE / "entry_points.txt", about)
    shutil.copy(PACKAGE / "my_lab.py", folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        patched.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
        yield Path(shutil.copy(PACKAGE / "scenario.yaml", tmp_path_factory.mktemp("mine")))
    sys.modules.pop("my_lab", None)


@pytest.fixture(scope="module")
def layer(scenario: Path) -> jm.Layer:
    return build_layer_model(load_scenario(scenario), "sharded")


def run(*arguments: object) -> str:
    """Calls a command, which has to succeed, and gives what it printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def page_of(out: Path) -> str:
    """The report of a folder of results."""
    run("report", out, "--out", out / "page.html")
    return (out / "page.html").read_text()


def trace() -> jm.GatingTrace:
    return jm.synthetic_trace(512, range(2), 32, 2, skew=0.8, coactivation=0.2, reuse=0.2, seed=0)


def test_all_parts_are_listed(scenario):
    told = run("list")
    for name in ("dragonfly", "from_the_last", "hottest", "startup", "spread", "mine"):
        assert name in told


def test_parts_are_tuned_bounded_replayed_and_shown(scenario, tmp_path):
    run("tune", scenario, "--out", tmp_path / "out")
    summary = summary_of(tmp_path / "out")
    for name in ("from_the_last", "ep", "tuned"):
        mean = summary["strategies"][name]["mean"]
        assert mean["des_model_total_s"] == pytest.approx(mean["des_total_s"], rel=0.02)
    assert {each["exchange"] for each in summary["strategies"]["tuned"]["layers"]} == {"round_robin"}
    best = {name: each["mean"]["best_total_s"] for name, each in summary["strategies"].items() if each["comparable"]}
    found = best.pop("tuned_gathered", best["tuned"])  # what the search ended with, if not surely faster than others
    assert best["tuned"] == min(best.values()) <= 1.01 * found
    assert 0 < summary["bound_s"]["mean"] <= best["tuned"]
    limits = [each["limit"]["resource"] for each in summary["strategies"]["from_the_last"]["layers"]]
    assert set(limits) == {"compute"}
    page = page_of(tmp_path / "out")
    assert "from_the_last" in page
    assert "round_robin" in page


def test_a_method_is_simulated_replayed_and_shown(scenario, tmp_path):
    run("simulate", scenario, "--iterations", 6, "--out", tmp_path / "out")
    hottest = summary_of(tmp_path / "out")["runs"]["hottest"]
    moved = np.array(hottest["simulated_movement_s"]), np.array(hottest["model_movement_s"])
    assert moved[0].min() > 0
    np.testing.assert_allclose(*moved, rtol=0.02)
    assert hottest["agreement"]["max_abs_error_percent"] < 2
    assert "hottest" in page_of(tmp_path / "out")


def test_parts_and_their_numbers_are_swept_and_shown(scenario, tmp_path):
    study = tmp_path / "study.yaml"
    axes = "{strategy: [ep, from_the_last], hardware.die.gemm.startup_us: [1, 4], hardware.groups: [2, 4]}"
    study.write_text(f"scenario: {scenario}\naxes: {axes}\nmetrics: [total, spread, bound]\n")
    run("sweep", study, "--out", tmp_path / "out")
    parquet = pytest.importorskip("pyarrow.dataset")
    rows = parquet.dataset(tmp_path / "out" / "points").to_table().to_pylist()
    assert len(rows) == 8
    assert all(row["spread"] > 0 and 0 < row["bound_s"] <= row["total_s"] for row in rows)
    assert "spread" in page_of(tmp_path / "out")
    study.write_text(
        f"scenario: {scenario}\naxes: {{system: [static, hottest], plan: [from_the_last]}}\niterations: 3\n"
    )
    run("sweep", study, "--out", tmp_path / "systems")
    assert "hottest on from_the_last" in page_of(tmp_path / "systems")


def test_numbers_of_parts_have_slopes(scenario, layer):
    described, batches = load_scenario(scenario), jm.sample_batches(trace(), 128, 2, seed=1)
    share = jm.place("from_the_last", trace(), layer.machine.topology)

    def seconds(numbers):
        changed = {"hardware.die.gemm.startup_us": numbers[0], "hardware.link.bandwidth_GB_per_s": numbers[1]}
        layer = build_layer_model(with_numbers(described, changed), "sharded")
        return jm.evaluate(layer, share, batches, smooth=0.02).total.mean()

    at, timed = jnp.array([2.0, 50.0]), jax.jit(seconds)
    slopes = jax.jit(jax.grad(seconds))(at)
    for place, step in enumerate(0.02 * at):
        ahead, back = (float(timed(at.at[place].add(sign * step))) for sign in (1, -1))
        assert slopes[place] == pytest.approx((ahead - back) / (2 * float(step)), rel=0.02)


def test_a_rollout_of_the_method_has_slopes(layer):
    steps = jm.sample_batches(trace(), 128, 3, seed=1)
    method = METHODS["hottest"](jm.place("from_the_last", trace(), layer.machine.topology))

    def seconds(bandwidth):
        slower = eqx.tree_at(lambda each: each.machine.topology.link_bandwidth, layer, bandwidth)
        return jm.rollout(method, slower, steps).time.total.mean()

    bandwidth = layer.machine.topology.link_bandwidth
    slope = float(eqx.filter_jit(jax.grad(seconds))(bandwidth).sum())
    ahead, back = (float(seconds(bandwidth * factor)) for factor in (1.02, 0.98))
    assert slope == pytest.approx((ahead - back) / (0.04 * float(bandwidth[0])), rel=0.02)


def test_a_placement_file_is_converted_there_and_back(scenario, tmp_path):
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"mine": [[0, 1, 2, 3], [3, 2, 1, 0]]}))
    run("plan", "convert", given, "--to", "eplb", "--ranks", 2, "--out", tmp_path / "there")
    run(
        "plan",
        "convert",
        tmp_path / "there" / "placement.npz",
        "--to",
        "mine",
        "--ranks",
        2,
        "--out",
        tmp_path / "back",
    )
    assert json.loads((tmp_path / "back" / "placement.json").read_text()) == json.loads(given.read_text())


CHECKS: dict[str, Callable[[jm.Layer], Report]] = {
    "topology": lambda layer: check_topology(layer.machine.topology),
    "exchange": lambda layer: check_exchange("round_robin", layer.machine.topology),
    "strategy": lambda layer: check_strategy(STRATEGIES["from_the_last"]),
    "kernel_model": lambda layer: check_kernel_model(KERNEL_MODELS["startup"](jnp.asarray(2.0))),
    "method": lambda layer: check_method(
        METHODS["hottest"](jm.place("from_the_last", trace(), layer.machine.topology)),
        layer,
        jm.sample_batches(trace(), 128, 2, seed=1),
    ),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_parts_pass_the_checks_that_users_run(layer, kind):
    report = CHECKS[kind](layer)
    assert report.notes == ()
    assert report.seconds > 0
    if report.simulated is not None:
        assert report.simulated == pytest.approx(report.seconds, rel=0.02)
    assert (report.bound is not None) == (kind == "exchange")


def test_a_kernel_model_that_promises_nothing_is_not_bounded(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(KERNEL_MODELS["startup"], "within_rate", False)
    told = run("evaluate", scenario, "--out", tmp_path / "out")
    assert "nothing bounds what tuning finds, as Startup does not state within_rate = True" in told
    assert summary_of(tmp_path / "out")["bound_s"] is None
