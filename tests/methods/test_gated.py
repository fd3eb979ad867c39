"""camoe's gate before another system: the bias by hand, what it leaves alone, against the simulator, and refusals."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from oracles import cases

from jaxmoe.config import load_scenario
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.simulation import batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import given_plans, strategy
from jaxmoe.methods import DeploymentSetting, UnsuitableSystemError, system_of
from jaxmoe.methods.camoe.gated import Gate, gated_steps
from jaxmoe.methods.system import TokenPaths
from jaxmoe.models import ElementBytes, MoEModel
from jaxmoe.traces import GatingTrace, TraceError, sample_batches, write_trace

EXPERTS, TOKENS = 16, 640
WAFER = {
    "kind": "mesh",
    "mesh_shape": [4, 4],
    "die": {"compute_TFLOPs_per_s": 0.05, "memory_bandwidth_GB_per_s": 50, "memory_capacity_GB": 1},
    "link": {"bandwidth_GB_per_s": 5, "latency_ns": 0},
    "router": {"chunk_B": 32},
}


def traced(tokens=TOKENS, layers=1, experts=EXPERTS, seed=0):
    """Tokens with normal logits that choose the two largest."""
    logits = np.random.default_rng(seed).normal(size=(tokens, layers, experts)).astype(np.float32)
    chosen = np.argsort(-logits, axis=2)[:, :, :2].astype(np.int16)
    return GatingTrace(chosen, experts, np.arange(layers), np.array([0]), None, {}, logits=logits)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    write_trace(folder / "trace.npz", traced())
    model = {"hidden_size": 128, "expert_size": 64, "num_experts": EXPERTS, "top_k": 2}
    model |= {"moe_layer_ids": {"first": 0, "count": 1}}
    model |= {"attention": {"kind": "grouped_query", "heads": 8, "kv_heads": 2, "head_size": 16}}
    content = {
        "hardware": WAFER,
        "model": model,
        "workload": {"batch_tokens": 128, "trace": {"kind": "file", "path": str(folder / "trace.npz")}},
        "strategies": {"hybrid_regions": 1},
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(content))
    return inputs_of(load_scenario(folder / "scenario.yaml"))


def runs_of(inputs, name, exchange=None, **settings):
    """The runs of a system with a gate or without one, and the steps that they go through."""
    iterations = iterations_of(inputs, 2)
    (plan,) = given_plans(["ep_balanced"], replace(inputs, trace=iterations.history), taken=(), compared=())
    if exchange is not None:
        plan = strategy(inputs, plan.name, plan.placement.share, exchange)
    return system_of(name, **settings).runs(setting_of(inputs, plan, iterations.history)), iterations


def two_nodes(latency=0.0) -> DeploymentSetting:
    """Two dies with an expert each; all tokens of the history choose both."""
    machine = cases.random_machine(np.random.default_rng(0), (1, 2))
    trace = GatingTrace(np.array([[[0, 1]]] * 4, np.int16), 2, np.arange(1), np.array([0]), None, {})
    trace = replace(trace, logits=np.zeros((4, 1, 2), np.float32))
    return DeploymentSetting(
        share=np.eye(2, dtype=np.float32)[None],
        mode="sharded",
        exchange=("token_home",),
        model=cases.layer_model(machine),
        moe=MoEModel("small", 64, 128, 2, 2, (0,), 1),
        bytes=ElementBytes(),
        batch_tokens=4,
        context_tokens=16,
        build_exchange=pytest.fail,
        describe=lambda mode, exchange: pytest.fail(exchange),
        trace=trace,
        history=trace,
    )


def test_the_own_node_is_favoured_by_lambda():
    # Whatever the link costs, the scores of a row with two entries, 0 and that cost, are -1 and 1.
    table = Gate(lambda_cost=0.25).table(two_nodes(), TokenPaths.of_nodes(np.arange(4) // 2, 2))
    np.testing.assert_allclose(table, [[[0.25, -0.25], [-0.25, 0.25]]], rtol=1e-5)


def test_a_home_whose_tokens_are_everywhere_favours_none():
    # Both nodes fetch from themselves, as from an entwined group with a member in every domain.
    table = Gate().table(two_nodes(), TokenPaths(np.zeros(4, np.int32), np.arange(2)[None, None]))
    np.testing.assert_array_equal(table, np.zeros((1, 1, 2)))


def test_an_expert_on_several_nodes_has_the_mean_of_their_biases():
    shared = replace(two_nodes(), share=np.array([[[0.5, 0.5], [0, 1]]], np.float32))
    table = Gate(lambda_cost=0.25).table(shared, TokenPaths.of_nodes(np.arange(4) // 2, 2))
    np.testing.assert_allclose(table, [[[0, -0.25], [0, 0.25]]], atol=1e-6)


def test_without_strength_nothing_changes(inputs):
    runs, iterations = runs_of(inputs, "moentwine", gate={"lambda_cost": 0.0}, balancer="none")
    plain, gated = (runs[name].rollout(iterations.batches) for name in ("moentwine", "moentwine+gate"))
    assert [*runs][-1] == "moentwine+gate"
    np.testing.assert_array_equal(gated.time.total, plain.time.total)
    assert (gated.figures["retained_gate_mass"], gated.figures["changed_choices"]) == (1, 0)


@pytest.mark.parametrize(
    ("name", "exchange", "settings"),
    [("moentwine", None, {"balancer": "none", "layout": "baseline"}), ("static", "token_home", {})],
)
def test_a_gated_system_is_the_system_on_the_biased_choices(inputs, name, exchange, settings):
    runs, iterations = runs_of(inputs, name, exchange, gate={"lambda_cost": 0.5}, **settings)
    *_, plain, gated = runs.values()
    rolled = gated.rollout(iterations.batches)
    # Choices of the largest biased logits, token by token.
    expected = np.array(iterations.batches.experts)
    for step, token in np.ndindex(expected.shape[1:3]):
        row = int(iterations.batches.row[0, step, token])
        logits = inputs.trace.logits[row, 0] + gated.bias[0, gated.paths.home[token]]
        expected[0, step, token] = np.argsort(-logits, kind="stable")[:2]
    chosen = replace(iterations.batches, experts=jnp.asarray(expected))
    np.testing.assert_array_equal(rolled.time.total, plain.rollout(chosen).time.total)
    np.testing.assert_allclose(gated.timed(iterations.batches, inputs.model.machine).total, rolled.time.total)
    assert 0 < rolled.figures["changed_choices"] < 0.5
    assert 0.8 < rolled.figures["retained_gate_mass"] < 1
    # Experts near a token are taken more often: links are less busy, all together.
    links = [each.time.busy["dispatch"]["link"].sum() for each in (plain.rollout(iterations.batches), rolled)]
    assert links[1] < links[0]
    simulated = gated.replay(rolled, batch_at(iterations, 0, 1), 1, 0)
    assert simulated == pytest.approx(rolled.compared[1, 0], rel=0.02)


def test_what_has_no_path_is_refused(inputs):
    with pytest.raises(UnsuitableSystemError, match=r"exchange lowest_host; set costs.exchange to token_home or"):
        runs_of(inputs, "static", "lowest_host", gate={})
    with pytest.raises(UnsuitableSystemError, match=r"layout: esp slices every expert alike; use the layout er"):
        runs_of(inputs, "moentwine", gate={}, layout="esp", balancer="none")


def test_logits_that_cannot_be_had_are_refused_by_the_name_of_the_key(inputs):
    without = replace(inputs, trace=replace(inputs.trace, logits=None))
    with pytest.raises(TraceError, match=r"^system\.gate\.logits is reconstructed: the trace has no gate weights"):
        runs_of(without, "static", "token_home", gate={"logits": "reconstructed"})


def test_camoe_keeps_experts_within_their_capacity_in_model_and_simulator(inputs):
    runs, iterations = runs_of(inputs, "camoe", lambda_cost=0.5, capacity_factor=1.25, time_model="congestion")
    for run in runs.values():
        rolled = run.rollout(iterations.batches)
        counts = [np.bincount(step.ravel(), minlength=EXPERTS) for step in rolled.kept[:, 0]]
        assert np.max(counts) == 20  # 1.25 times 128 tokens x 2 / 16 experts
        assert np.sum(counts) == 2 * 128 * len(counts)  # none is dropped
        simulated = run.replay(rolled, batch_at(iterations, 0, 1), 1, 0)
        np.testing.assert_allclose(rolled.time.total[1, 0], simulated, rtol=0.03)
    free, _ = runs_of(inputs, "camoe", lambda_cost=0.5)
    assert free["camoe"].rollout(iterations.batches).figures["avg_layer_cv"] > rolled.figures["avg_layer_cv"]


def test_tokens_that_do_not_name_their_rows_of_the_trace_are_refused():
    steps = sample_batches(traced(), 8, 2, seed=0)
    with pytest.raises(ValueError, match="draw them with numbered=True"):
        gated_steps(traced(), np.zeros((1, 4, EXPERTS)), steps)
