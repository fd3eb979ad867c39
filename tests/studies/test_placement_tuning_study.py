"""What the study of placement tuning keeps and works out, on rows made up by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.table import add_shared, make_tables, study_options
from jaxmoe.files import write_table
from jaxmoe.traces import sample_batches, synthetic_trace
from jaxmoe.tune.descent import TransportPlan, random_plans
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.settings import StopSwitch

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("cases", "scoring", "main_table", "sensitivity", "machines", "gaps", "any_exchange", "study", "summary")
NAMES += ("alternatives", "gains", "variations", "finite_buffers", "gains_summary", "markdown_tables", "elsewhere")
NAMES += ("uneven",)


@pytest.fixture(scope="module")
def study():
    """The modules of the study, which import each other by plain names."""
    folder = str(ROOT / "studies" / "placement_tuning")
    kept = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, folder)
    try:
        import alternatives  # noqa: F401
        import study
        import summary

        yield study, summary
    finally:
        sys.path.remove(folder)
        for name in NAMES:
            sys.modules.pop(name, None)
            if kept[name] is not None:
                sys.modules[name] = kept[name]


def test_a_job_whose_rows_are_there_is_not_run_again(study, tmp_path, monkeypatch, capsys):
    runner, _ = study
    monkeypatch.setattr(sys.modules["cases"], "HERE", tmp_path)
    for folder in ("traces", "reference"):
        (tmp_path / folder).mkdir()
    parser = study_options(None, resume=True)
    add_shared(parser, tmp_path, "traces", "reference")
    parser.add_argument("--layers-step", type=int, default=8)
    given = parser.parse_args(["sensitivity", "--list", "--only", "sensitivity_5TFLOPs", "--out", str(tmp_path)])
    names = [f"sensitivity/sensitivity_5TFLOPs_{tokens}" for tokens in (32, 128, 1024)]
    for left in (names, names[1:]):
        make_tables(tmp_path, runner.tables(given), given)
        assert capsys.readouterr().out.split() == left
        (tmp_path / "sensitivity.csv").write_text("job\nsensitivity_5TFLOPs_32\n")


def test_every_case_machine_and_cell_has_a_job(study, tmp_path):
    runner, _ = study
    run = sys.modules["cases"].Run(tmp_path, layers_step=8)
    count = {table: len(runner.names(table, run)) for table in runner.JOBS}
    # Ten cases of four layers, with and without trees; three of them once more in the published setting.
    assert count["main"] == 10 * 4 * 2 + 3 * 4
    assert count["machines"] == 10 * 4 * 3
    assert count["sensitivity"] == 3 * 3
    # Layers of the main table and cells of machines; with 2 and 4 copies those of which every part is left out.
    assert count["gains"] == 10 * 4 + 120 + 2 * (3 * 4 + 1)
    assert count["variations"] == 3 * 2
    # The even machine and ten others; Mixtral does not fit one of them.
    assert count["uneven"] == 11 + 10


def row(trees, strategy, over, exchange="tree", layer="0"):
    case = sys.modules["cases"].CASES[0].name
    about = {"job": "j", "case": case, "layer": layer, "trees": trees, "strategy": strategy, "plan": strategy}
    return about | {"exchange": exchange, "total_us": str(100 * over), "over_tuned": str(over), "bound_us": "80"}


def test_main_table_has_mean_and_least_of_ratios(study):
    _, summary = study
    rows = [row("yes", "tuned", 1.0), row("yes", "tuned", 1.0, "other", "8"), row("yes", "tuned", 1.0, "other", "16")]
    rows += [row("yes", "published", 1.2), row("yes", "published", 1.4, layer="8"), row("no", "published", 9.0)]
    line = summary.main_table(rows, "yes").splitlines()[2]
    assert "| 3 | 100.0 | other, tree | 1.300 (1.200) | - |" in line
    assert line.endswith("| 1.25 |")


def test_the_old_claim_is_beside_the_best_exchanges(study):
    _, summary = study
    rows = [
        row("lowest_host", "published", 1.5, "lowest_host"),
        row("no", "published", 1.1),
        row("yes", "published", 1.0),
    ]
    line = summary.old_claim(rows).splitlines()[2]
    assert "| 1.500 (1.500) | 1.100 (1.100) | 1.000 (1.000) | 1.50 |" in line


def test_cells_are_won_by_the_fastest(study):
    _, summary = study
    cell = {"TFLOPs_per_s": "5", "GB_per_s": "50", "batch_tokens": "128", "ports": "none"}
    rows = [
        cell | {"latency_ns": latency, "strategy": name, "total_us": us}
        for latency, times in (("0", ("9", "10")), ("2000", ("30", "20")))
        for name, us in zip(("tp_both_ways", "ep"), times, strict=True)
    ]
    lines = summary.sensitivity(rows).splitlines()
    assert lines[0] == "| hop latency, µs | ep wins | tp_both_ways wins |"
    assert lines[2:] == ["| 0 | 0 | 1 |", "| 2 | 1 | 0 |"]


def cell(model, shipped, tuned, bound):
    times = {"shipped_over_tuned": f"{shipped / tuned}", "tuned_over_bound": f"{tuned / bound}", "bound_us": str(bound)}
    about = {"machine": "m", "model": model, "batch_tokens": "128", "shipped": "tp"}
    return about | {"shipped_us": str(shipped), "tuned_us": str(tuned)} | times


def deal(model, groups, compute, communication, least):
    about = {"machine": "m", "model": model, "batch_tokens": "128", "groups": groups, "compute_us": str(compute)}
    total = {"total_us": str(compute + communication), "least_total_us": str(least)}
    return about | {"communication_us": str(communication)} | total


def test_cells_far_from_the_bound_are_counted_by_what_the_deals_say(study):
    _, summary = study
    cells = [cell("near", 105, 105, 100), cell("a", 120, 120, 100), cell("b", 150, 125, 100), cell("c", 130, 130, 100)]
    deals = [deal("a", "1", 100, 20, 118), deal("a", "4", 110, 15, 119)]  # TP is best, and near its own least
    deals += [deal("b", "1", 100, 50, 149), deal("b", "4", 110, 30, 120)]  # tuned beats them all
    deals += [deal("c", "1", 100, 40, 130), deal("c", "4", 105, 20, 110)]  # another exchange beats the tuned plan
    counted = summary.gap_counts(deals, cells)
    for line in (
        "| cells; more than 10 % above the bound | 4; 3 |",
        "| best shipped is TP; of these within 10 % of the bound; of these returned | 4; 1; 3 |",
        "| far cells with a gain; without | 1; 2 |",
        "faster than the best shipped of the table; than the tuned plan | 2; 1 |",
        "| tuned over the best deal: gain at most; loss at most | 1.120; 0.962 |",
        "| without a gain: TP is the best deal | 1 |",
        "reached their bounds | 1 |",
        "| without a gain: the others, tuned over that | 1.18 |",
        "| with a gain: more than 10 % above that | - |",
        "at most | 1.077 |",
    ):
        assert line in counted
    assert "| m | b | 128 | 100 | 125 | 1.2 | 100.0 + 50.0 | 0.99 | 4 | 110.0 + 30.0 | 120.0 | 1.20 |" in summary.gaps(
        deals, cells
    )


def test_cells_far_above_all_deals_are_asked_what_a_new_exchange_could_give(study, tmp_path, monkeypatch):
    runner, summary = study
    monkeypatch.setattr(sys.modules["cases"], "HERE", tmp_path)
    cells = [cell("near", 105, 105, 100), cell("explained", 120, 120, 100), cell("open", 130, 130, 100)]
    cells.append(cell("gain", 140, 130, 100))
    deals = [
        deal("explained", "1", 100, 20, 118),
        deal("gain", "1", 100, 20, 110),
        deal("open", "1", 100, 30, 129),
        deal("open", "4", 105, 20, 110),
    ]
    for table, rows in (("machines", cells), ("gaps", deals)):
        write_table(tmp_path / f"{table}.csv", [{"job": "j"} | row for row in rows])
    assert runner.names("any_exchange", sys.modules["cases"].Run(tmp_path)) == [("any_exchange_m_open_128",)]
    about = {"machine": "m", "model": "open", "batch_tokens": "128", "compute_us": "105"}
    rows = [about | {"groups": "4", "least_total_us": "116", "balanced_us": "20", "balanced_total_us": "125"}]
    rows += [about | {"groups": "8", "least_total_us": "117", "balanced_us": "15", "balanced_total_us": "120"}]
    line = summary.any_exchange(rows, deals, cells).splitlines()[2]
    assert line == "| m | open | 128 | 130 | 1.18 | 1.12 | 1.08 | 8 | 105.00 + 15.00 |"


@pytest.mark.parametrize("name", ["expert_softmax", "node_softmax"])
def test_other_relaxations_decide_whole_experts(study, name, monkeypatch):
    monkeypatch.setattr(TransportPlan, "share", getattr(sys.modules["alternatives"], name))
    plan = jax.tree.map(lambda leaf: leaf[0, 0], random_plans(0, 1, 1, 6, 4))
    decisions = plan.decisions(np.full(6, 1 / 6), np.full(4, 1 / 4), 0.5, 0.1)
    np.testing.assert_allclose(decisions.share.sum(axis=1), 1, rtol=1e-5)
    assert not np.allclose(decisions.share, decisions.share[:1])


def gain(strategy, over, interval, layer="0", copies="1"):
    about = {"cell": "c", "layer": layer, "copies": copies, "strategy": strategy, "experts_per_node": "2"}
    return about | {"total_us": str(10 * over), "over_tuned": str(over), "interval": str(interval), "bound_us": "8"}


def test_what_a_part_gives_is_a_geometric_mean_with_its_interval(study):
    summaries = sys.modules["gains_summary"]
    rows = [gain("tuned", 1.0, 0.0, layer) for layer in "08"]
    rows += [gain("without_descent", 1.1, 0.03), gain("without_descent", 0.99, 0.02, "8")]
    line = summaries.gains(rows).splitlines()[2]
    # sqrt(1.1 * 0.99), and half the root of (0.03 / 1.1)^2 + (0.02 / 0.99)^2 of it
    assert line == "| c | 1 | 2 | 2 | 10.00 | 1.044 +- 0.018 | 1.25 |"
    line = summaries.over_layers(rows).splitlines()[2]
    # One ratio is above 1.05 and above its interval.
    assert line == "| 1 | without descent | 2 | 1.044 +- 0.018 | 0.990 | 1.100 | 1 | 1 | 0 |"


def test_variations_have_a_column_for_every_cell_and_number_of_copies(study):
    rows = [gain("shipped", 1.2, 0.01) | {"variation": "as tuned"}, gain("tuned", 1, 0) | {"variation": "as tuned"}]
    rows += [gain("shipped", 1.05, 0.02, copies="2") | {"variation": "hops"}]
    lines = sys.modules["gains_summary"].variations(rows).splitlines()
    assert lines[0] == "| variation | c, copies: 1 | c, copies: 2 |"
    assert lines[2:] == ["| as tuned | 1.200 +- 0.010 | - |", "| hops | - | 1.050 +- 0.020 |"]


def test_tuning_and_judging_text_are_of_different_requests(study):
    gains = sys.modules["gains"]
    trace = synthetic_trace(40, [0], 4, 2, skew=1.0, coactivation=0.0, reuse=0.0, seed=0)
    several = replace(trace, seq_start=np.array([0, 10, 20]))
    tuning, judging = gains.halves(several)
    assert (tuning.num_tokens, judging.num_tokens) == (30, 10)
    np.testing.assert_array_equal(judging.experts, trace.experts[10:20])
    first, second = gains.halves(trace)  # a single one is cut
    np.testing.assert_array_equal(np.concatenate([first.experts, second.experts]), trace.experts)


def test_what_is_left_out_has_a_strategy_of_its_own(study, tmp_path):
    gains, run = sys.modules["gains"], sys.modules["cases"].Run(tmp_path)
    whole = [cell for cell in gains.cells(run) if cell.whole]
    assert len({cell.name for cell in whole}) == 4
    assert all(set(gains.PARTS) <= set(cell.left_out) for cell in whole)
    assert gains.WHOLE_MACHINE in gains.MACHINES


@pytest.fixture
def problem(configs):
    """Eight experts on a 2x2 mesh, whose first die is three times as fast as the others."""
    trace = synthetic_trace(64, [0], 8, 2, skew=1.0, coactivation=0.0, reuse=0.0, seed=0)
    own = ["hardware=nmp_4x4", "hardware.mesh_shape=[2,2]", "workload.batch_tokens=16", "strategies.hybrid_regions=2"]
    own += ["hardware.dies=[{nodes: [0], compute_TFLOPs_per_s: 15}]", "model.num_experts=8", "model.top_k=2"]
    own += ["workload.trace={kind: synthetic, tokens: 64}"]
    inputs = read_inputs(configs / "scenarios" / "quickstart.yaml", own, None, "0")
    return replace(placement_problem(inputs), trace=trace, exchanges=("least_loaded", "reduce_scatter"))


def test_copies_serve_the_nearest_in_turn_or_by_draw(study):
    elsewhere = sys.modules["elsewhere"]
    held = np.array([0, 1, 0, 2, 1, 2, 0, 1])  # two slots on each of four nodes in a row
    hops = np.abs(np.arange(4)[:, None] - np.arange(4))
    rules = elsewhere.serving_rules(held, hops)
    # Expert 0 is on nodes 0, 1 and 3: node 2 is as near to both of the latter, and takes the first.
    assert rules["nearest"].table[0, 0].tolist() == [0, 2, 2, 6]
    assert rules["in_turn"].table[0, 0].tolist() == [0, 2, 6, 0]
    np.testing.assert_allclose(rules["draw"].parts[0], [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3, 1 / 3])
    for rule in rules.values():
        rule.check(held[None], 4)


def test_balancers_have_equally_many_slots_on_every_node_and_their_best_rule(study, problem):
    elsewhere = sys.modules["elsewhere"]
    found = {name: search() for name, search in elsewhere.slots(problem, 2).items()}
    judging = sample_batches(problem.trace, 16, 3, 7)
    for plan in found.values():
        np.testing.assert_array_equal(plan.share.sum(axis=(0, 1)), np.full(4, 4))
        assert plan.problem.num_experts == 16
        assert np.isfinite(plan.judged(judging).total).all()
    assert found["eplb_by_draw"].served_by == "draw"
    # The best rule is at least as fast as any one of them on the batches that choose.
    best, drawn, _ = (elsewhere._ranked(each.problem, each.share, elsewhere.LOOK_BATCHES) for each in found.values())
    assert best.seconds.mean() <= drawn.seconds.mean()
    three = synthetic_trace(64, [0], 3, 2, skew=1.0, coactivation=0.0, reuse=0.0, seed=0)
    assert elsewhere.slots(replace(problem, trace=three), 2) == {}  # six slots on four nodes


def test_the_even_row_has_no_plan_by_pace(study, problem):
    uneven = sys.modules["uneven"]
    flops = np.array([1.0, 1, 1, 8], np.float32) * 1e9
    model = problem.model
    die = replace(model.machine.die, flops=jnp.asarray(flops))
    problem = replace(problem, model=replace(model, machine=replace(model.machine, die=die)))
    with StopSwitch() as stop:
        best = Evaluator(problem, uneven.SEED, stop).shipped
    even, judging = uneven.shipped_even(problem), sample_batches(problem.trace, 16, 3, 7)
    by_pace = uneven.Found(problem, best.plan, str(best.exchange[0]))
    # Compute limits: the fast node has eight elevenths of the work, or a quarter.
    assert by_pace.judged(judging).total.mean() < 0.7 * even.judged(judging).total.mean()


def test_uneven_machines_differ_as_they_say(study, tmp_path, configs):
    uneven = sys.modules["uneven"]
    assert uneven.rates([(0, 3), (1, 3)], 5) == "hardware.dies=[{nodes: [3, 11], compute_TFLOPs_per_s: 5}]"
    for each in uneven.MACHINES:
        machine = build_machine(load_hardware(configs / "hardware" / f"{each.machine}.yaml", plain(each.overrides)))
        rate, link = np.asarray(machine.die.flops), np.asarray(machine.topology.link_bandwidth)
        memory = np.ones(1) if machine.capacity is None else np.asarray(machine.capacity)
        told = any(len(set(values.tolist())) > 1 for values in (rate, memory, link)) if each.overrides else True
        assert told, each.name


def plain(overrides):
    """Overrides of a machine alone, in place of a scenario's."""
    return [each.removeprefix("hardware.") for each in overrides]
