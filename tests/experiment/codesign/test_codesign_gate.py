"""A bias of the gate beside machine and placement: limits that are kept, and times that come true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxmoe.config import ConfigError
from jaxmoe.config.hardware_space import read_space
from jaxmoe.engine.gating import GateBias
from jaxmoe.experiment.codesign.placements import IN_TURN, placement_on
from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.codesign.search import tune_hardware
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.traces import GatingTrace, TraceError, sample_batches, write_trace
from jaxmoe.tune.machine.gate_table import gated, lost_by_layer, within

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
BOUNDS = {DIE: {"from": 0.01, "to": 10, "scale": "log"}, LINK: {"from": 0.1, "to": 100, "scale": "log"}}
JOINT = {"variables": BOUNDS, "constraints": [f"3 * {DIE} + 0.2 * {LINK} <= 1.5"], "placement": "tuned"}
LAYERS, EXPERTS, TOP_K, NODES = 2, 4, 2, 4


def routed(tokens: int = 64, layer_ids: tuple[int, ...] = (3, 5), seed: int = 0) -> GatingTrace:
    """Tokens that choose their two largest logits, expert 0 more often than others."""
    logits = np.random.default_rng(seed).normal(size=(tokens, len(layer_ids), EXPERTS)).astype(np.float32)
    logits[..., 0] += 1
    experts = np.argsort(-logits, axis=-1)[..., :TOP_K].astype(np.int16)
    return GatingTrace(experts, EXPERTS, np.array(layer_ids), np.array([0]), None, {}, logits=logits)


def test_a_table_is_scaled_until_it_keeps_the_limit_and_no_further():
    batches = sample_batches(routed(), 16, 8, seed=0, logits=True)
    table = np.random.default_rng(1).normal(scale=3, size=(LAYERS, NODES, EXPERTS)).astype(np.float32)
    losses = {limit: float(lost_by_layer(within(table, batches, limit), batches).mean()) for limit in (0.05, 0.1, 1.0)}
    assert 0.8 * 0.05 < losses[0.05] <= 0.05
    assert 0.8 * 0.1 < losses[0.1] <= 0.1
    np.testing.assert_array_equal(within(table, batches, 1.0), table)


def test_gated_batches_are_those_of_a_loop():
    batches = sample_batches(routed(), 16, 3, seed=0, logits=True)
    table = np.random.default_rng(1).normal(size=(LAYERS, NODES, EXPERTS)).astype(np.float32)
    made = gated(jnp.asarray(table), batches)
    assert made.logits is None
    for layer in range(LAYERS):
        for number in range(3):
            batch = jax.tree.map(lambda leaf, at=(layer, number): leaf[at], batches)
            expected = GateBias(jnp.asarray(table[layer]))(batch).experts
            np.testing.assert_array_equal(made.experts[layer, number], expected)


@pytest.fixture
def space(tmp_path):
    def write(**sections):
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(JOINT | sections, sort_keys=False))
        return read_space(path)

    return write


@pytest.mark.slow
def test_joint_is_no_slower_than_in_turn_and_is_as_fast_as_is_told(space, scenario, tmp_path):
    trace = tmp_path / "routed.npz"
    write_trace(trace, routed())
    fixed = {"workload.trace": {"kind": "file", "path": str(trace)}}
    dear_links = space(gate_loss=0.1, starts=4, steps=25, constraints=[f"0.1 * {DIE} + {LINK} <= 1.5"])
    problem = hardware_problem(dear_links, scenario, fixed, [3])
    with StageTimer() as clock:
        result = tune_hardware(problem, lambda *_: None, clock)
    own = {each.name: each.own for each in result.candidates}
    assert {IN_TURN, f"{IN_TURN}+gate", "tuned+gate"} <= set(own)
    assert result.best.metric <= min(own.values()) * (1 + 1e-5)
    # In turn experts are divided over all nodes, where no choice is nearer than another; at once each is on one node.
    assert own["tuned+gate"] < own[f"{IN_TURN}+gate"] <= own[IN_TURN] * (1 + 1e-5)
    for each in result.candidates:
        table = each.design.table
        assert (table is not None) == each.name.endswith("+gate")
        if table is None:
            continue
        assert table.shape == (1, NODES, EXPERTS)
        inputs = inputs_of(problem.scenario_at({key: each.numbers[key] for key in problem.keys}), layers="3")
        # The limit is kept on other batches: of so few tokens as the evaluation's, a mean tells little.
        others = placement_on(problem, inputs).draw(512, 7)
        assert float(lost_by_layer(jnp.asarray(table), others).mean()) < 0.11
        batches = gated(jnp.asarray(table), inputs.routed_batches)
        seconds = float(score(inputs, each.design.strategy, batches).mean.mean())
        assert seconds == pytest.approx(each.own, rel=1e-4)


def test_a_gate_needs_logits_and_a_placement(space, scenario):
    with pytest.raises(TraceError, match="no logits, which a biased gate needs"):
        hardware_problem(space(gate_loss=0.1, starts=1, steps=25), scenario, {}, [3])
    with pytest.raises(ConfigError, match="gate_loss"):
        space(gate_loss=0.1, placement="usual")
    with pytest.raises(ConfigError, match="gate_loss"):
        space(gate_loss=0.0)
