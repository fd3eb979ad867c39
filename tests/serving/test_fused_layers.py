"""Layers whose experts a fitted kernel times in one launch a node: a node pays for the experts that it has."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels_by_hand import kernel_file

from jaxmoe.experiment.evaluation import replay, score
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.hardware.gpu.files import write_kernels

SCENARIO = """
hardware:
  kind: switch
  nodes: 4
  die: {compute_TFLOPs_per_s: 100, gemm: {kind: fitted, path: kernels.json, backend: sglang, precision: bfloat16}}
  link: {bandwidth_GB_per_s: 100, latency_ns: 0}
model: {hidden_size: 2048, expert_size: 512, num_experts: 16, top_k: 2, moe_layer_ids: {count: 1}}
workload: {batch_tokens: 256, trace: {kind: synthetic, tokens: 512}}
validation: {batches: 2}
"""


@pytest.fixture
def inputs(tmp_path):
    write_kernels(tmp_path / "kernels.json", kernel_file())
    (tmp_path / "fused.yaml").write_text(SCENARIO)
    return read_inputs(tmp_path / "fused.yaml", [], None, None)


def test_every_strategy_computes_as_long_as_in_the_simulator(inputs):
    """The simulator launches what a node has; the model knows it by presence alone."""
    strategies = {each.name: each for each in standard_strategies(inputs)}
    for name in ("tp", "ep_balanced", "hybrid_complete"):
        batches = inputs.validation_batches
        told = score(inputs, strategies[name], batches, as_simulated=True).compute
        seen = replay(inputs, strategies[name], batches, lambda *_: None).time.compute
        np.testing.assert_allclose(told, seen, rtol=0.02, err_msg=name)


def test_a_node_does_not_pay_for_experts_elsewhere(inputs):
    """Four more experts change nothing for a node that none of them is on."""
    gemm, costs = inputs.model.machine.die.gemm, inputs.model.costs
    rows, here, rate = jnp.full((8, 2), 64.0), jnp.repeat(jnp.eye(2), 4, axis=0), jnp.full(2, 1e6)
    few = gemm.node_seconds(rows[:4], here[:4], here[:4], rate, costs.columns, costs.gemms)
    all_of_them = gemm.node_seconds(rows, here, here, rate, costs.columns, costs.gemms)
    assert float(all_of_them[0]) == pytest.approx(float(few[0]), rel=1e-6)
    assert float(all_of_them[1]) == pytest.approx(float(all_of_them[0]), rel=1e-6)
    assert float(few[1]) == pytest.approx(0, abs=1e-12)
