"""Regions on a machine and a trace that were measured before they were built: memory buys time."""

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.engine import evaluate, serving_of
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import named_strategies, weights_on_nodes

# Microseconds of DeepSeek-V2-Lite's layer 13, worked out apart from this code by shares and tokens of each region.
KNOWN = {"regions_1x1_tp": 37.56, "regions_1x2_tp": 29.36, "regions_2x2_tp": 25.10}


@pytest.mark.slow
def test_regions_take_the_time_that_is_known(shared, configs):
    trace = shared / "traces" / "deepseek-v2-lite" / "summary.npz"
    chosen = ["hardware=nmp_8x8_10TFLOPs_25GBps", "model=deepseek-v2-lite", "workload.batch_tokens=128"]
    chosen += [f"costs.{each}" for each in ("ffn_flops=6hi", "bytes_per_element=2", "weight_bytes_per_element=2")]
    chosen += ["costs.exchange=corner_host_split_tree", f"workload.trace={{kind: file, path: {trace}}}"]
    drawn = ["evaluation.batches=64", "validation.batches=1"]
    inputs = read_inputs(configs / "scenarios" / "quickstart.yaml", [*chosen, *drawn], trace, "13")
    batches = jax.tree.map(lambda leaf: leaf[:, :16], inputs.evaluation_batches)
    one = None
    for times, strategy in zip((1, 2, 4), named_strategies(inputs, KNOWN), strict=True):
        copies = strategy.placement.copies
        time = evaluate(
            inputs.model,
            jnp.asarray(copies.share),
            batches,
            inputs.exchange("corner_host_split_tree"),
            serving=serving_of(copies),
        )
        assert 1e6 * float(time.total.mean()) == pytest.approx(KNOWN[strategy.name], abs=0.01)
        held = weights_on_nodes(inputs, strategy.placement).most
        one = held if one is None else one
        assert held == pytest.approx(times * one, rel=1e-5)
