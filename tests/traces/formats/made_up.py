"""Traces for properties, and what comes back of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces import GatingTrace


@st.composite
def trace_parts(draw, weights: bool = False, logits: bool = False) -> dict[str, Any]:
    """The parts of any small trace whose sequences go from prefill to decode."""
    tokens, num_experts = draw(st.integers(1, 12)), draw(st.integers(2, 9))
    top_k = draw(st.integers(2, min(3, num_experts)))
    layer_ids = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (tokens, len(layer_ids))
    experts = rng.permuted(np.broadcast_to(np.arange(num_experts), (*shape, num_experts)), axis=2)[..., :top_k]
    starts = sorted({0} | draw(st.sets(st.integers(0, tokens - 1), max_size=3)))
    position = np.arange(tokens) - np.repeat(starts, np.diff([*starts, tokens]))
    return {
        "experts": experts.astype(np.int16),
        "num_experts": num_experts,
        "layer_ids": np.array(layer_ids),
        "seq_start": np.array(starts),
        "is_repeat": None,
        "facts": {},
        # Both exact in the narrowest type that a format has.
        "weights": rng.integers(0, 64, (*shape, top_k)).astype(np.float16) / 64 if weights else None,
        "logits": rng.integers(-64, 64, (*shape, num_experts)).astype(np.float32) / 4 if logits else None,
        "phase": (position >= draw(st.integers(1, 6))).astype(np.int8),
    }


def given_trace(**wanted: bool) -> Callable[[Callable], Callable]:
    """Run a test `(tmp_path_factory, trace)` on any small trace, with weights or logits where wanted."""

    def decorate(test: Callable) -> Callable:
        @given(parts=trace_parts(**wanted))
        def run(tmp_path_factory, parts):
            # Made here: type checks draw random numbers, which strategies must not.
            test(tmp_path_factory, GatingTrace(**parts))

        return run

    return decorate


def assert_same(back: GatingTrace, trace: GatingTrace, *optional: str) -> None:
    """Equal in all that every trace has, and in these optional parts."""
    for name in ("experts", "layer_ids", *optional):
        np.testing.assert_array_equal(getattr(back, name), getattr(trace, name), err_msg=name)
    assert back.num_experts == trace.num_experts
