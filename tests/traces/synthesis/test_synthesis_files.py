"""That a process survives its file, and that other files are refused with one clear message."""

import json

import jax
import numpy as np
import pytest
from oracles import synthesis as oracle

from jaxmoe.traces import TraceError, synthetic_trace, write_trace
from jaxmoe.traces.synthesis import RequestDeck, read_process, write_process


def process(prompt=True, drift=0.25):
    rng = np.random.default_rng(0)
    length = rng.integers(1, 20, 6)
    prompts = rng.integers(length + 1) if prompt else None
    return oracle.random_process(0, 2, 5, 2, RequestDeck(length, prompts, rng.integers(3, size=(6, 4)), 5, drift))


@pytest.fixture
def path(tmp_path):
    write_process(tmp_path / "process.npz", process())
    return tmp_path / "process.npz"


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("drift", [0.0, 0.25])
def test_there_and_back(tmp_path, prompt, drift):
    made = process(prompt, drift)
    write_process(tmp_path / "p.npz", made)
    read = read_process(tmp_path / "p.npz")
    for a, b in zip(jax.tree.leaves(made.preferences), jax.tree.leaves(read.preferences), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    for name in ("length", "prompt", "topics"):
        np.testing.assert_array_equal(getattr(read.requests, name), getattr(made.requests, name))
    assert (read.requests.window, read.requests.drift) == (5, drift)
    for name in ("layer_ids", "top_k", "facts", "expert_groups", "groups_per_token"):
        assert getattr(read, name) == getattr(made, name)


def test_groups_survive(tmp_path):
    made = oracle.random_process(0, 1, 6, 2, oracle.same_requests(2, 3))
    object.__setattr__(made, "expert_groups", 3)
    object.__setattr__(made, "groups_per_token", 2)
    write_process(tmp_path / "p.npz", made)
    read = read_process(tmp_path / "p.npz")
    assert (read.expert_groups, read.groups_per_token) == (3, 2)


def refused(path, *expected):
    with pytest.raises(TraceError) as caught:
        read_process(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for text in expected:
        assert text in message


def test_a_file_that_is_not_there(tmp_path):
    refused(tmp_path / "none.npz", "no such file")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 and no more", b"{}"])
def test_a_file_of_another_kind(tmp_path, content):
    (tmp_path / "p.npz").write_bytes(content)
    refused(tmp_path / "p.npz", "not a readable npz")


def test_a_folder_and_a_lone_array(tmp_path):
    refused(tmp_path, "not a readable npz")
    np.save(tmp_path / "p.npy", np.zeros(3))
    refused(tmp_path / "p.npy", "not a readable npz")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    refused(path, "not a readable npz")


def test_damage_is_refused_where_it_changes_anything(path):
    whole, made = path.read_bytes(), process()
    messages = []
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read = read_process(path)
        except TraceError as error:
            messages.append(str(error))
        else:  # a byte that says nothing, such as a time of day
            np.testing.assert_array_equal(read.preferences.together, made.preferences.together)
            np.testing.assert_array_equal(read.requests.length, made.requests.length)
    assert len(messages) > 10
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_a_trace_is_no_process(tmp_path):
    trace = synthetic_trace(8, (0,), 4, 2, skew=0.0, coactivation=0.0, reuse=0.0, seed=0)
    write_trace(tmp_path / "t.npz", trace)
    refused(tmp_path / "t.npz", "popularity", "fit a process to this trace", "jaxmoe trace fit")


def test_pickled_objects_are_refused(path):
    rewrite(path, facts=np.array([{}], object))
    refused(path, "not a readable npz")


def rewrite(path, **changes):
    with np.load(path) as file:
        arrays = dict(file)
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize("name", ["popularity", "length", "facts", "groups_per_token"])
def test_an_array_that_is_not_there(path, name):
    rewrite(path, **{name: None})
    refused(path, f"has no {name}")


@pytest.mark.parametrize("version", [None, 0, 2, "new"])
def test_another_version(path, version):
    rewrite(path, process_version=version)
    refused(path, f"is of version {version}, expected 1")


NOT_FINITE = np.full((2, 5, 5), np.nan)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("popularity", np.zeros(5), "popularity has shape (5,)"),
        ("popularity", np.zeros((2, 4)), "of shape (3, 2, 5), expected finite numbers of shape (3, 2, 4)"),
        ("popularity", np.full((2, 5), "a"), "popularity is <U1"),
        ("topics", np.zeros((3, 2, 6)), "topics is float64 of shape (3, 2, 6)"),
        ("topics", np.zeros(()), "topics is float64 of shape ()"),
        ("topics", np.zeros((2, 2, 5)), "topic 2"),
        ("phases", np.zeros((1, 2, 5)), "phases is"),
        ("from_layer", np.zeros((2, 5)), "from_layer is"),
        ("from_token", NOT_FINITE, "from_token is float64 of shape (2, 5, 5), expected finite numbers"),
        ("together", NOT_FINITE / 0.0, "together is"),
        ("usual", np.zeros((1, 5)), "usual is"),
        ("length", np.zeros(6), "length is float64"),
        ("length", np.zeros((6, 1), int), "length is"),
        ("length", np.zeros(6, int), "at least one token"),
        ("length", np.ones(5, int), "topics has shape (6, 4)"),
        ("prompt", np.ones(5, int), "prompt has shape (5,)"),
        ("prompt", np.full(6, 99), "prompt holds"),
        ("request_topics", np.zeros((6, 4)), "request_topics is float64"),
        ("request_topics", np.zeros((6, 0), int), "do not cover"),
        ("window", np.zeros((), int), "do not cover"),
        ("window", np.ones(2, int), "window is int64 of shape (2,)"),
        ("drift", np.array(2.0), "drift is 2.0"),
        ("drift", np.array("x"), "drift is <U1"),
        ("layer_ids", np.array([1, 2, 3]), "layer_ids is"),
        ("layer_ids", np.array([1, 1]), "twice"),
        ("top_k", np.array(9), "chooses 9 experts"),
        ("top_k", np.array(2.0), "top_k is float64"),
        ("expert_groups", np.array(0), "expert_groups is 0"),
        ("facts", np.array("{"), "facts is '{'"),
        ("facts", np.array(json.dumps([1])), "facts is '[1]'"),
    ],
)
def test_an_array_that_does_not_fit(path, name, array, expected):
    rewrite(path, **{name: array})
    refused(path, expected)


def test_a_file_is_replaced_whole_or_not_at_all(path, monkeypatch):
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        write_process(path, process())
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
