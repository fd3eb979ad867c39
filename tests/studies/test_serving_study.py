"""The study of serving: runs as they are read, and the recorded ones within what is asked of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import InputError
from jaxmoe.serving.online.from_profile import profile_table
from jaxmoe.serving.online.profile import read_profile

STUDY = Path(__file__).parents[2] / "studies" / "serving"
MODULES = ("models", "runs", "step_times", "study")
# Of the mean, the median, and P90 to P99, in %.
ASKED = {
    "rtxpro6000_qwen3-30b-a3b": {"ttft": (20, 15, 15), "tpot": (4, 4, 4), "latency": (4, 4, 4)},
    "rtxpro6000_qwen3-32b": {"ttft": (6, 6, 6), "tpot": (4, 4, 4), "latency": (4, 4, 4)},
}


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(STUDY))
    for name in MODULES:  # another study's of the same name
        sys.modules.pop(name, None)
    import runs
    import step_times
    import study

    yield runs, step_times, study
    sys.path.remove(str(STUDY))
    for name in MODULES:
        sys.modules.pop(name, None)


def a_run(folder: Path, **changed) -> Path:
    """A run of two requests of a dense model on one GPU; the second comes first."""
    asked = {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    meta = {"model": "Qwen/Qwen3-8B", "vllm_version": "0.19.0", "engine_kwargs": asked} | changed
    cluster = {"nodes": [{"instances": [{"hardware": "ANY", "npu_mem": {"mem_size": 24, "mem_util": 0.9}}]}]}
    times = {"input_toks": 10, "output_toks": 5, "scheduled_ts": 0.0}
    requests = [
        times | {"arrival_time": 1007.0, "queued_ts": 7.5, "first_token_ts": 9.0, "last_token_ts": 11.0},
        times | {"arrival_time": 1005.0, "queued_ts": 5.25, "first_token_ts": 6.0, "last_token_ts": 6.5},
    ]
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    (folder / "vllm" / "meta.json").write_text(json.dumps(meta))
    (folder / "config.json").write_text(json.dumps(cluster))
    (folder / "vllm" / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    return folder


def test_a_run_as_it_is_read(modules, tmp_path):
    """The clock of arrivals is the engine's: the request that it took soonest came a quarter of a second before."""
    run = modules[0].read_run(a_run(tmp_path))
    np.testing.assert_allclose(run.requests.arrival, [0.0, 2.0])
    np.testing.assert_allclose(run.waited.first_token, [0.75, 1.5])
    np.testing.assert_allclose(run.waited.per_token, [0.125, 0.5])
    np.testing.assert_allclose(run.waited.latency, [1.25, 3.5])
    engine = run.fleet.engine
    assert (engine.seats, engine.token_budget, engine.ranks, run.fleet.engines) == (4, 64, 1, 1)
    # 0.9 of 24 GiB less 8.19 G weights of 2 B and 1.2 GB, in blocks of 16 tokens of 36 layers with 8 heads of 128.
    assert engine.kv_blocks == pytest.approx((0.9 * 24 * 2**30 - 2 * 8.19e9 - 1.2e9) / (16 * 36 * 4096), rel=0.01)


def test_blocks_that_vllm_counted_are_taken(modules, tmp_path):
    run = modules[0].read_run(a_run(tmp_path, kv_cache={"num_gpu_blocks": 123}))
    assert run.fleet.engine.kv_blocks == 123


def test_ranks_of_experts_step_together_and_those_of_a_dense_model_apart(modules, tmp_path):
    asked = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    apart = modules[0].read_run(a_run(tmp_path / "dense", engine_kwargs=asked))
    assert (apart.fleet.engines, apart.fleet.engine.ranks, apart.deployment.devices) == (2, 1, 1)
    many = {"model": "Qwen/Qwen3-30B-A3B-Instruct-2507", "kv_cache": {"num_gpu_blocks": 9}}
    together = modules[0].read_run(a_run(tmp_path / "experts", engine_kwargs=asked, **many))
    assert (together.fleet.engines, together.fleet.engine.ranks, together.deployment.expert_ranks) == (1, 2, 2)


def test_what_a_run_lacks_is_told(modules, tmp_path):
    read = modules[0].read_run
    with pytest.raises(InputError, match=r"meta.json: no such file"):
        read(tmp_path)
    with pytest.raises(InputError, match=r"has no max_num_seqs"):
        read(a_run(tmp_path, engine_kwargs={"max_num_batched_tokens": 64}))
    with pytest.raises(InputError, match=r"the model a/b is not known; known are .*--model"):
        read(a_run(tmp_path, model="a/b"))
    (a_run(tmp_path) / "vllm" / "requests.jsonl").write_text('{"input_toks": 3}')
    with pytest.raises(InputError, match=r"a row is not as expected \('output_toks'\)"):
        read(tmp_path)


def test_a_gather_and_a_scatter_are_halves_of_an_all_reduce(modules, tmp_path):
    table = tmp_path / "all_reduce.csv"
    head = "op_name,kernel_source,num_gpus,message_size,latency"
    rows = ["all_reduce,vLLM_custom_graph,2,100,0.5", "all_reduce,vLLM_custom_graph,2,300,1.5"]
    table.write_text("\n".join([head, *rows, "all_reduce,vLLM_custom_eager,2,100,9"]))
    found = modules[1].measured(table, 2)
    np.testing.assert_allclose(found("all_reduce", np.array([200.0, 400.0])), [0.5e-3, 1e-3])
    np.testing.assert_allclose(found("all_gather", np.array([400.0])), [0.5e-3])
    with pytest.raises(InputError, match="give measured ones with --exchange"):
        modules[1].measured(tmp_path / "none.csv", 2)
    with pytest.raises(InputError, match="has no all_reduce of 4 GPUs"):
        modules[1].measured(table, 4)


@pytest.mark.parametrize("name", ASKED)
def test_recorded_runs_are_told(modules, shared, name):
    folder = shared / "measured" / "serving" / name
    if not folder.is_dir():
        pytest.skip("no recorded runs here")
    run = modules[0].read_run(folder)
    profile = read_profile(folder.with_name(f"profile_{name}"), run.deployment.tensor)
    comm = shared / "measured" / "gpu" / "rtx_pro_6000_server" / "comm"
    exchange = modules[1].measured(comm / f"vllm_{run.version}" / "custom_allreduce_perf.parquet", 2)
    padding = modules[1].Padding(modules[1].graph_sizes(run.fleet.engine.seats))
    table = profile_table(profile, run.model, run.deployment, exchange, padding)
    for row in modules[2].compared(run, "profile", modules[2].told(run, table)):
        place = {"mean": 0, "median": 1}.get(row["statistic"], 2)
        assert abs(100 * row["error"]) <= ASKED[name][row["metric"]][place], row
