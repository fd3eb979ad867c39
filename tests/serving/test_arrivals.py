"""Requests from files of every layout and from random processes; what is wrong in them is one clear error."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import InputError
from jaxmoe.serving.online.arrivals import Lengths, Prefixes, at_rate, check_lengths, drawn, mean_rate
from jaxmoe.serving.online.recorded import read_requests
from jaxmoe.serving.online.requests import Requests

SHARED = Path(__file__).resolve().parents[3] / "shared"
LENGTHS = Lengths(prompt=1000, output=200, prompt_variation=0.8, output_variation=1.5)


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 4500, "input_length": 600, "output_length": 2, "hash_ids": [7, 4]},
]


def test_mooncake_has_milliseconds_and_names_of_blocks(tmp_path):
    requests = read_requests(jsonl(tmp_path / "trace.jsonl", MOONCAKE))
    assert requests.arrival.tolist() == [0, 1.5]
    assert (requests.prompt.tolist(), requests.output.tolist()) == ([1100, 600], [5, 2])
    assert requests.prefix_blocks[requests.prefix_starts[1] : requests.prefix_starts[2]].tolist() == [7, 4]


def test_a_benchmark_of_vllm_is_sorted_as_its_engine_queued_it(tmp_path):
    rows = [
        {"request_id": "b", "input_toks": 20, "output_toks": 2, "arrival_time": 0.0, "queued_ts": 102.5},
        {"request_id": "a", "input_toks": 10, "output_toks": 1, "arrival_time": 1.0, "queued_ts": 100.25},
    ]
    requests = read_requests(jsonl(tmp_path / "run.jsonl", rows))
    assert (requests.arrival.tolist(), requests.prompt.tolist()) == ([0, 2.25], [10, 20])


def test_columns_tell_the_layout_of_a_csv(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1.0,374,44\n4.5,396,109\n4.5,1,1\n")
    requests = read_requests(path, most=2)
    assert (requests.arrival.tolist(), requests.prompt.tolist()) == ([0, 3.5], [374, 396])
    assert requests.output.tolist() == [44, 109]


def test_arrays_of_azure_have_exact_times(tmp_path):
    columns = {"context_tokens": np.array([5, 6], np.int32), "generated_tokens": np.array([1, 2], np.int32)}
    arrival = np.array([10_000_000, 10_000_001])
    np.savez(tmp_path / "azure.npz", arrival_s=np.zeros(2, np.float32), arrival_100ns=arrival, name="x", **columns)
    requests = read_requests(tmp_path / "azure.npz")
    assert requests.arrival == pytest.approx([0, 1e-7], rel=1e-9)
    assert requests.prompt.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("file", "count", "tokens"),
    [  # as the pages beside the files say
        ("measured/arrivals/mooncake_conversation.jsonl", 12031, 144_793_823),
        ("traces/arrivals/azure_llm_2023_code.npz", 8819, None),
        ("measured/arrivals/splitwise_conv.csv", 19366, None),
        ("measured/serving/rtxpro6000_qwen3-30b-a3b/vllm/requests.jsonl", 300, None),
    ],
)
def test_recorded_files_are_read_whole(file, count, tokens):
    if not (SHARED / file).is_file():
        pytest.skip("the recorded files are not beside the clone")
    requests = read_requests(SHARED / file)
    assert len(requests) == count
    assert requests.arrival[0] == 0
    assert tokens is None or requests.prompt.sum() == pytest.approx(tokens, rel=1e-3)


WRONG = {
    "order": ([MOONCAKE[1], MOONCAKE[0]], "request 1 comes at -1.5 s, before request 0 at 0 s; .* sort the file"),
    "output": ([{**MOONCAKE[0], "output_length": 0}], "request 0 has output 0; expected 1 token or more"),
    "column": ([{"timestamp": 0, "input_len": 3}], "its columns are timestamp, input_len; expected .*Mooncake: time"),
    "missing": ([MOONCAKE[0], {"timestamp": 0, "input_length": 3}], "request 1 has output_length None; expected a wh"),
    "part": ([{**MOONCAKE[0], "input_length": 2.5}], "request 0 has input_length 2.5; expected a whole number"),
    "text": ([{**MOONCAKE[0], "timestamp": "soon"}], "request 0 has timestamp 'soon'; expected a time"),
    "nan": ([{**MOONCAKE[0], "timestamp": float("nan")}], "request 0 has timestamp nan; expected a time"),
    "blocks": ([{**MOONCAKE[0], "hash_ids": 4}], "request 0 has hash_ids 4; expected a list of numbers"),
    "empty": ([], "the file has no requests"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_one_error_with_its_place(case, tmp_path):
    rows, said = WRONG[case]
    with pytest.raises(InputError, match=said):
        read_requests(jsonl(tmp_path / "trace.jsonl", rows))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*none\.csv"):
        read_requests(tmp_path / "none.csv")
    (tmp_path / "trace.txt").touch()
    with pytest.raises(InputError, match=r"trace\.txt: expected a file of requests that ends in \.jsonl, \.csv"):
        read_requests(tmp_path / "trace.txt")
    for name in ("trace.npz", "trace.jsonl"):
        (tmp_path / name).write_text("{broken")
        with pytest.raises(InputError, match=f"{name}: cannot be read: .*; give a "):
            read_requests(tmp_path / name)


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_and_lengths_have_the_means_and_variations_asked(variation):
    requests = drawn(4.0, variation, 40_000, LENGTHS, seed=3)
    gaps = np.diff(requests.arrival)
    for values, mean, relative in (
        (gaps, 0.25, variation),
        (requests.prompt, 1000, 0.8),
        (requests.output, 200, 1.5),
    ):
        assert values.mean() == pytest.approx(mean, rel=5 * relative / 200)  # five standard errors
        assert values.std() / values.mean() == pytest.approx(relative, rel=0.15)
    assert requests.output.min() >= 1
    assert mean_rate(requests) == pytest.approx(1 / gaps.mean())


def test_the_seed_decides_and_parts_do_not_disturb_each_other():
    plain = drawn(4.0, 1.0, 50, LENGTHS, seed=3)
    shared = drawn(4.0, 1.0, 50, LENGTHS, seed=3, prefixes=Prefixes(4, 100), topics=3)
    assert shared.arrival.tolist() == plain.arrival.tolist()
    assert (shared.prompt - plain.prompt).tolist() == [100] * 50
    assert drawn(4.0, 1.0, 50, LENGTHS, seed=4).arrival.tolist() != plain.arrival.tolist()
    assert set(shared.topic.tolist()) == {0, 1, 2}


def test_without_variation_requests_come_like_a_clock():
    requests = drawn(4.0, 0.0, 5, Lengths(10, 3), seed=0)
    assert requests.arrival.tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert (requests.prompt.tolist(), requests.output.tolist()) == ([10] * 5, [3] * 5)


def test_common_texts_are_popular_by_zipf():
    texts = Prefixes(count=3, tokens=64, skew=1.0).draw(60_000, np.random.default_rng(0))
    part = np.bincount(texts) / 60_000
    assert part == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.01)


def test_another_rate_keeps_order_lengths_and_the_pattern_of_gaps():
    own = drawn(4.0, 2.0, 100, LENGTHS, seed=1)
    faster = at_rate(own, 10.0)
    assert mean_rate(faster) == pytest.approx(10.0)
    assert np.diff(faster.arrival) / np.diff(own.arrival) == pytest.approx(mean_rate(own) / 10)
    assert faster.prompt is own.prompt
    together = Requests(np.zeros(2), np.array([1, 1]), np.array([1, 1]))
    assert mean_rate(together) == np.inf
    with pytest.raises(InputError, match="rate_per_s is 3, but all 2 requests come at once; leave it out"):
        at_rate(together, 3.0)


def test_a_context_over_the_models_is_told_with_its_request():
    requests = Requests(np.zeros(3), np.array([5, 90, 95]), np.array([95, 11, 10]))
    check_lengths(requests, 105, "a.key")
    with pytest.raises(
        InputError, match=r"request 1 has a prompt of 90 and an output of 11 .* 100 .*, and 2 of 3 .*raise a.key"
    ):
        check_lengths(requests, 100, "a.key")
