"""What people read first: the main table at any width, what limits every strategy, and tokens a second."""

import re

import pytest

from jaxmoe.cli import comparison_figures
from jaxmoe.cli.comparison_output import as_factor, print_comparison, print_steps
from jaxmoe.cli.session import OutputFolder
from jaxmoe.cli.sweep_answers import label_of, print_limits
from jaxmoe.config import load_scenario
from jaxmoe.experiment import standard_strategies
from jaxmoe.experiment.comparison import Comparison, compare
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.limits import LayerLimit, usual_limit
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import comparison_report
from jaxmoe.experiment.whole_model import WholeModel

LONGEST = "corner_host_split_tree"  # of the exchanges that may be chosen
CACHE = "{name: cache, bandwidth_GB_per_s: 100}"
SLOW_DDR = f"hardware.memory=[{CACHE}, {{name: ddr, bandwidth_GB_per_s: 0.5, nodes_per_channel: 2}}]"
FAST_DDR = f"hardware.memory=[{CACHE}, {{name: ddr, bandwidth_GB_per_s: 900, nodes_per_channel: 2}}]"


def compared(scenario, names: list[str], *overrides: str) -> tuple[Inputs, Comparison]:
    """These strategies on one layer."""
    inputs = inputs_of(load_scenario(scenario, overrides), layers="3")
    strategies = [strategy for strategy in standard_strategies(inputs) if strategy.name in names]
    with StageTimer() as clock:
        return inputs, compare(inputs, strategies, clock, lambda stage, done, total: None)


@pytest.fixture(scope="module")
def bound_by_ddr(kept_scenario) -> tuple[Inputs, Comparison]:
    exchanges = f"tuning.exchanges=[{LONGEST}]"
    return compared(kept_scenario, ["tp", "ep_balanced", "hybrid", "hybrid_complete"], SLOW_DDR, exchanges)


@pytest.fixture
def columns(request, monkeypatch) -> int | None:
    """A terminal so wide, or none."""
    if request.param is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize("columns", [80, 120, 200, None], indirect=True)
@pytest.mark.parametrize("no_color", [False, True])
def test_a_row_of_the_main_table_is_a_line(bound_by_ddr, columns, no_color, capsys, monkeypatch):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    print_comparison(*bound_by_ddr, "small: mean over 1 layer")
    raw = capsys.readouterr().out
    assert ("\x1b" in raw) <= (columns is not None)
    assert not no_color or not re.search(r"\x1b\[(\d+;)*[349]\d", raw)
    *lines, sentence = without_escapes(raw).splitlines()
    rows = {line.split("│")[1].strip(): line for line in lines if line.startswith("│")}
    assert rows.keys() == {"tp", "ep_balanced", "hybrid", "hybrid_complete"}
    first = next(line for line in lines if "hybrid_complete" in line)
    assert LONGEST in first
    assert "memory: ddr" in first
    assert max(map(len, lines)) <= (columns or 180)
    assert sentence.startswith("fastest: ")


def test_the_closing_sentence_names_the_memory_level(bound_by_ddr, capsys):
    inputs, comparison = bound_by_ddr
    print_comparison(inputs, comparison, "small")
    printed = capsys.readouterr().out
    # Two nodes at each channel of 0.5 GB/s, each with a quarter of four experts of 3 x 64 x 128 weights of 4 bytes.
    seconds = 2 * 3 * 64 * 128 * 4 / 0.5e9
    limit = comparison.best("tp").times[0].limit("compute")
    assert (limit.kind, limit.seconds) == ("ddr", pytest.approx(seconds))
    said = r"µs a layer, limited by memory: ddr in compute, which takes 100 % of the time, most often at channel \d;"
    assert re.search(said, printed)


def test_the_place_is_that_of_most_layers():
    at = [("compute", "compute", 3, 0.5), ("compute", "compute", 18, 0.7), ("compute", "compute", 18, 0.9)]
    at += [("dispatch", "link", [2, 3], 0.6), ("dispatch", "link", [2, 3], 0.6)]
    limits = [LayerLimit(stage, resource, place, 1.0, part) for stage, resource, place, part in at]
    usual = usual_limit(limits)
    assert (usual.where, usual.part) == ("node 18", pytest.approx(0.7))
    assert usual_limit(limits[2:]).where == "link 2 to 3"
    assert LayerLimit("compute", "latency", None, 1.0, 1.0).where == ""


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (FAST_DDR, "memory: cache"),  # 100 GB/s against 1 TFLOP/s: 4 bytes of weights for 2 FLOPs of each of 4 tokens
        ("hardware.link.bandwidth_GB_per_s=0.001", "link"),
        ("hardware.link.latency_ns=1e6", "latency"),
        ("hardware.ports.ejection_GB_per_s=0.001", "port"),
        ("hardware.link.bandwidth_GB_per_s=1e6", "compute"),
    ],
)
def test_the_limit_is_what_the_machine_lacks(scenario, change, limit, capsys):
    few = "tuning.exchanges=[reduce_scatter]"
    print_comparison(*compared(scenario, ["ep_balanced"], change, few), "small")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ ep_balanced"))
    assert row.rstrip("│ ").endswith(f"│ {limit}")


def test_picture_and_summary_name_the_memory_level(bound_by_ddr, tmp_path, monkeypatch):
    inputs, comparison = bound_by_ddr
    drawn = []
    monkeypatch.setattr(comparison_figures, "plot_breakdown", lambda *given: drawn.append(given[-1]))
    with OutputFolder(tmp_path, "evaluate") as folder:
        comparison_figures.draw_comparison(folder, inputs, comparison)
    told = comparison_report(inputs, comparison)["strategies"]
    for name in comparison.strategies:
        assert drawn[0][name] == told[name]["limit"] == told[name]["best_limit"] == "memory: ddr in compute"
        assert told[name]["layers"][0]["best_limit"]["resource"] == "ddr"


def test_a_ratio_says_that_it_is_a_factor():
    assert [as_factor(1.123), as_factor(10.0), as_factor(None)] == ["1.12x", "10.00x", "-"]


# A step of the whole model.

MODEL = WholeModel(
    tokens=64,
    context=1024,
    devices=16,
    layers=4,
    timed=2,
    dense_layers=1,
    parts={"attention": 1e-3, "dense": 5e-4, "shared": 5e-4},
)


def test_a_step_is_all_layers_and_what_is_beside_them(capsys):
    step = MODEL.step(2e-3)
    assert step.seconds == pytest.approx(4 * 2e-3 + 2e-3)
    assert step.tokens_per_s == pytest.approx(6400)
    assert step.tokens_per_s_device == pytest.approx(400)
    print_steps(MODEL, {"tp": step})
    printed = " ".join(capsys.readouterr().out.split())
    assert "│ tp │ 10.00 │ 6,400 │ 400.0 │" in printed
    assert "64 tokens on 16 devices" in printed
    for told in ("counted: 4 MoE layers (as the mean of 2", "attention over 1024 tokens", "not counted: traffic"):
        assert told in printed


def test_attention_of_a_system_is_not_counted_twice():
    # Of five layers one is dense: its attention alone is not in the layers that the system times.
    assert MODEL.step(2e-3, with_attention=True).seconds == pytest.approx(4 * 2e-3 + 1e-3 / 5 + 1e-3)


# Sweeps.


def test_a_sweep_tells_memory_levels_from_other_resources(capsys):
    print_limits({"tp": {"ddr": 2, "link": 1}, "ep": {"compute": 3}})
    heading, *_ = [line for line in capsys.readouterr().out.splitlines() if line.startswith("┃")]
    assert [cell.strip() for cell in heading.strip("┃").split("┃")] == ["strategy", "compute", "memory: ddr", "link"]


def test_microseconds_have_their_letter():
    assert label_of("hardware.link.latency_us") == "link latency [µs]"
