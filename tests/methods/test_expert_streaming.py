"""The system expert_streaming from a scenario, in the model and in the event simulator."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.des.buffers import BufferError
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.simulation import batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.methods import UnsuitableSystemError, system_of
from jaxmoe.methods.expert_streaming import fse_dp

SCENARIO = """
hardware:
  mesh_shape: [2, 2]
  die: {compute_TFLOPs_per_s: 1}
  link: {bandwidth_GB_per_s: 50, latency_ns: 4}
  memory:
    - {name: sram, bandwidth_GB_per_s: 1000, capacity_GB: 0.0001}
    - {name: ddr, bandwidth_GB_per_s: 5}
model:
  {hidden_size: 256, expert_size: 256, num_experts: 8, top_k: 2, moe_layer_ids: {first: 0, count: 2},
   shared_experts: {count: 1, size: 256}, attention: {kind: grouped_query, heads: 4, kv_heads: 4, head_size: 64}}
workload: {batch_tokens: 16, context_tokens: 32, trace: {kind: synthetic, tokens: 128}}
costs: {bytes_per_element: 1, weight_bytes_per_element: 1, exchange: token_home}
tuning: {exchanges: [token_home]}
system: {name: expert_streaming, micro_slices: 4, control_ns: 10}
"""


def made(path: Path, *overrides: str):
    """Runs of the scenario, and its iterations."""
    file = path / "small.yaml"
    file.write_text(SCENARIO)
    inputs = read_inputs(file, [*overrides], None, None)
    iterations = iterations_of(inputs, 3)
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    strategy = given_plans(["ep_balanced"], inputs, taken=(), compared=())[0]
    return system.runs(setting_of(inputs, strategy, iterations.history)), iterations


EVERYDAY = ("ep_prefetch", "fse_tokens_prefetch", "expert_streaming")


@pytest.mark.parametrize(
    "names", [EVERYDAY, pytest.param(("ep", "fse_tokens", "fse_paired"), marks=pytest.mark.slow)], ids=["few", "rest"]
)
def test_every_run_is_replayed_as_modelled(tmp_path, names):
    runs, iterations = made(tmp_path, "system.strategy=fse_buffered", "system.slack=0.5")
    assert [*runs][:2] == ["ep", "hydra"]
    assert [*runs][-1] == "expert_streaming"
    for name in names:
        run = runs[name]
        rolled = run.rollout(iterations.batches)
        assert rolled.time.total.shape == (3, 2)
        assert (rolled.time.stages["attention"] > 0).all()
        simulated = np.array([run.replay(rolled, batch_at(iterations, row, 1), 1, row) for row in range(2)])
        np.testing.assert_allclose(rolled.compared[1], simulated, rtol=0.15, err_msg=name)
    # Every token passes the shared expert, which comes after the eight others.
    rolled = runs["expert_streaming"].rollout(iterations.batches)
    assert (rolled.kept[0][0, :, 8].sum(axis=-1) == 16).all()


def test_overlap_is_what_the_simulator_does(tmp_path):
    """Loads, transfers and arrays are side by side anyhow: serial's time after attention, within 3 % of simulated."""
    runs, iterations = made(tmp_path, "schedule=overlap")
    for name in ("fse_tokens", "fse", "expert_streaming"):
        rolled = runs[name].rollout(iterations.batches)
        streamed = rolled.time.total - rolled.time.stages["attention"]
        ways = [(step, row) for step in range(3) for row in range(2)]
        seen = [runs[name].replay(rolled, batch_at(iterations, row, step), step, row) for step, row in ways]
        off = np.divide([streamed[way] for way in ways], seen) - 1
        assert np.abs(off).mean() < 0.03, (name, off)
    with pytest.raises(ConfigError, match=r'schedule is "pipelined\(2\)"; expected a schedule without micro-batches'):
        made(tmp_path, "schedule=pipelined(2)")


def test_another_number_does_not_compile_again(tmp_path):
    # Each compilation is one call of the traced function.
    traced = []
    original = fse_dp.streams
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fse_dp, "streams", lambda *given: traced.append(1) or original(*given))
        for control, tokens in ((10, 16), (20, 16), (20, 24)):
            changed = (f"system.control_ns={control}", f"workload.batch_tokens={tokens}")
            runs, iterations = made(tmp_path, "system.strategy=fse", *changed)
            runs["expert_streaming"].rollout(iterations.batches)
    assert len(traced) <= 1


def test_groups_that_are_loaded_in_turn_take_longer(tmp_path):
    seconds = {}
    for ahead in ("true", "false"):
        runs, iterations = made(tmp_path, "system.attention=false", f"system.ahead={ahead}")
        run = runs["expert_streaming"]
        rolled = run.rollout(iterations.batches)
        simulated = np.array([run.replay(rolled, batch_at(iterations, row, 1), 1, row) for row in range(2)])
        np.testing.assert_allclose(rolled.compared[1], simulated, rtol=0.15)
        seconds[ahead] = simulated.sum()
    assert seconds["false"] > 1.02 * seconds["true"]


def test_spreading_tokens_evenly_takes_their_way_there_and_back(tmp_path):
    runs, iterations = made(tmp_path, "system.attention=false", "system.redistribute=true")
    run = runs["expert_streaming"]
    rolled = run.rollout(iterations.batches)
    tokens = rolled.kept[0]
    assert (tokens.max(axis=-1) - tokens.min(axis=-1)).max() <= 1
    # As many as are moved leave the busiest port of a link at least once, 256 B each way at 50 GB/s.
    slowest = 2 * 256 * 16 * 3 / 50e9 + 4e-8
    moved = rolled.time.stages["redistribution"]
    assert (moved > 2 * 4e-9).all()
    assert (moved < slowest).all()
    np.testing.assert_allclose(rolled.time.total, rolled.time.stages["stream"] + moved)


# Attention of many heads over few keys keeps arrays busy longer than DDR.
LONG_ATTENTION = (
    "model.attention={kind: grouped_query, heads: 32, kv_heads: 1, head_size: 64}",
    "workload.context_tokens=512",
    "hardware.die.compute_TFLOPs_per_s=0.2",
)


@pytest.mark.slow
def test_prefetch_takes_what_attention_leaves_idle_and_no_more(tmp_path):
    streamed = {}
    for forecast in ("none", "cross_layer", "perfect"):
        runs, iterations = made(tmp_path, *LONG_ATTENTION, f"system.prefetch={forecast}")
        run = runs["expert_streaming"]
        rolled = run.rollout(iterations.batches)
        simulated = np.array([run.replay(rolled, batch_at(iterations, row, 1), 1, row) for row in range(2)])
        np.testing.assert_allclose(rolled.compared[1], simulated, rtol=0.15, err_msg=forecast)
        streamed[forecast] = rolled.time.stages["stream"].mean()
    assert rolled.figures["prefetched"] > 0.05
    idle = float(run.layer.idle_seconds(jnp.asarray(16.0)).min())
    gained = streamed["none"] - streamed["perfect"]
    assert 0.5 * min(idle, rolled.figures["prefetched"] * streamed["none"]) < gained < 1.05 * idle
    assert streamed["perfect"] <= streamed["cross_layer"] * 1.001


def test_nothing_is_prefetched_where_attention_leaves_nothing_idle(tmp_path):
    runs, iterations = made(tmp_path, "system.attention=false", "system.prefetch=perfect")
    assert runs["expert_streaming"].rollout(iterations.batches).figures["prefetched"] == 0
    with pytest.raises(UnsuitableSystemError, match=r"prefetch is perfect, but system\.loaded_by is trajectory"):
        made(tmp_path, "system.loaded_by=trajectory", "system.prefetch=perfect")


def test_a_plan_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r'system.plan is "tp".*no plan is used, since all dies load all experts; leave the key'
    ):
        made(tmp_path, "system.plan=tp")


def test_machines_that_cannot_stream_are_told(tmp_path):
    with pytest.raises(UnsuitableSystemError, match="loads experts from memory, but the machine lists none"):
        made(tmp_path, "hardware.memory=[]")
    memory = "[{name: sram, bandwidth_GB_per_s: 1000}, {name: ddr, bandwidth_GB_per_s: 5}]"
    with pytest.raises(UnsuitableSystemError, match="sram, whose capacity is not stated"):
        made(tmp_path, f"hardware.memory={memory}")


def test_a_buffer_that_is_too_small_is_told_before_anything_is_timed(tmp_path):
    runs, iterations = made(tmp_path, "system.buffer_MB=0.01")
    with pytest.raises(BufferError, match="a micro-slice has 12288 B, but a die's buffer 10000 B"):
        runs["expert_streaming"].rollout(iterations.batches)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("system.slack=1.5", "slack"),
        ("system.micro_slices=0", "micro_slices"),
        ("system.strategy=fse_best", "strategy"),
        ("hardware.memory=[{name: sram, bandwidth_GB_per_s: 0}]", "bandwidth_GB_per_s"),
    ],
)
def test_bad_settings_name_their_key(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, override)
