"""Which traces are refused, and what remains of a trace when tokens or layers are selected."""

import dataclasses

import numpy as np
import pytest

from jaxmoe.traces import GatingTrace, TraceError

EXPERTS = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 0]], [[2, 1], [0, 1]], [[3, 2], [1, 2]]], np.int16)


def trace(**fields) -> GatingTrace:
    """Four tokens, layers 5 and 7, two of four experts, sequences at tokens 0 and 2."""
    legal = GatingTrace(EXPERTS, 4, np.array([5, 7]), np.array([0, 2]), np.array([False, True, False, True]), {})
    return dataclasses.replace(legal, **fields)


def with_expert(value) -> np.ndarray:
    experts = EXPERTS.astype(np.int64)
    experts[2, 1, 0] = value
    return experts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0, expected 1 to 32768"),
        ({"num_experts": 2**15 + 1}, "num_experts is 32769"),
        ({"experts": EXPERTS[0]}, r"experts has shape \(2, 2\), expected non-empty \[token, layer, top_k\]"),
        ({"experts": EXPERTS[:0]}, r"experts has shape \(0, 2, 2\)"),
        ({"experts": EXPERTS[..., :0]}, r"experts has shape \(4, 2, 0\)"),
        ({"experts": EXPERTS.astype(float)}, "experts has type float64, expected whole numbers"),
        ({"experts": EXPERTS == 1}, "experts has type bool"),
        ({"experts": with_expert(-2)}, "layer 7, token 2 chose expert -2, expected 0..3"),
        ({"experts": with_expert(4)}, "layer 7, token 2 chose expert 4, expected 0..3"),
        ({"experts": with_expert(2**16)}, "layer 7, token 2 chose expert 65536"),
        ({"experts": with_expert(1)}, "layer 7, token 2 chose expert 1 twice"),
        ({"layer_ids": np.array([5])}, r"layer_ids has shape \(1,\), expected \(2,\)"),
        ({"layer_ids": np.array([5, 5])}, "layer_ids names a layer twice"),
        ({"layer_ids": np.array([5.0, 7.0])}, "layer_ids has type float64"),
        ({"is_repeat": np.array([True])}, r"is_repeat has shape \(1,\)"),
        ({"is_repeat": np.array([0, 1, 0, 2])}, "is_repeat has type int64"),
        ({"seq_start": np.array([0, 2, 2])}, "seq_start must be a list that ascends from 0"),
        ({"seq_start": np.array([0, 3, 2])}, "seq_start"),
        ({"seq_start": np.array([1, 2])}, "seq_start"),
        ({"seq_start": np.array([0, 4])}, "stays below 4"),
        ({"seq_start": np.array([], int)}, "seq_start"),
        ({"seq_start": np.array(0)}, "seq_start"),
    ],
)
def test_unusable_traces_are_refused(fields, message):
    with pytest.raises(TraceError, match=message):
        trace(**fields)


def test_any_integers_are_kept_as_int16():
    kept = trace(experts=EXPERTS.astype(np.uint64)).experts
    assert kept.dtype == np.int16
    np.testing.assert_array_equal(kept, EXPERTS)


def test_repeats_are_dropped_and_sequences_move_up():
    kept = trace().without_repeats()  # tokens 0 and 2; the second sequence now starts at token 1
    np.testing.assert_array_equal(kept.experts, EXPERTS[[0, 2]])
    assert kept.seq_start.tolist() == [0, 1]
    assert trace(is_repeat=None).without_repeats().num_tokens == 4
    with pytest.raises(TraceError, match="every token is marked as a repeat"):
        trace(is_repeat=np.ones(4, bool)).without_repeats()


def test_layers_are_selected_by_their_number_in_the_model():
    chosen = trace().select_layers((7,))
    np.testing.assert_array_equal(chosen.experts, EXPERTS[:, 1:])
    assert trace().select_layers((7, 5)).layer_ids.tolist() == [7, 5]
    with pytest.raises(TraceError, match=r"layers \[6\] are not in the trace, which has \[5, 7\]"):
        trace().select_layers((5, 6))


def test_many_choices_are_compared_as_few_are():
    many = np.arange(40, dtype=np.int16)[::-1].reshape(1, 1, 40).copy()
    parts = {"num_experts": 40, "layer_ids": np.array([0]), "seq_start": np.array([0]), "is_repeat": None, "facts": {}}
    GatingTrace(many, **parts)
    many[0, 0, :3] = -1  # missing ones may be there many times
    GatingTrace(many, **parts)
    many[0, 0, 7] = many[0, 0, 30]
    with pytest.raises(TraceError, match=f"chose expert {many[0, 0, 30]} twice"):
        GatingTrace(many, **parts)


def test_halves_are_every_other_sequence_and_share_no_token():
    """Sequences of 2, 1 and 3 tokens, whose first choice is the number of the token."""
    experts = np.arange(6, dtype=np.int16).reshape(6, 1, 1)
    trace = GatingTrace(experts, 6, np.array([0]), np.array([0, 2, 3]), None, {})
    seen, held = trace.halves()
    assert (seen.experts.ravel().tolist(), seen.seq_start.tolist()) == ([0, 1, 3, 4, 5], [0, 2])
    assert (held.experts.ravel().tolist(), held.seq_start.tolist()) == ([2], [0])
    with pytest.raises(TraceError, match="one sequence"):
        held.halves()
