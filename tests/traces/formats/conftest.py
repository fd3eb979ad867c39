"""A small trace with all that a trace can have, and what formats are asked of it."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.traces import GatingTrace, Hints, TraceError, read_any

# Three tokens, layers 1 and 3 of a model with five, two of five experts each.
CHOICES = [[[0, 1], [2, 3]], [[4, 0], [3, 0]], [[2, 1], [0, 1]]]
HINTS = Hints(num_experts=5, top_k=2, layer_ids=(1, 3), num_layers=5)


@pytest.fixture
def choices() -> np.ndarray:
    return np.array(CHOICES, np.int16)


@pytest.fixture
def hints() -> Hints:
    return HINTS


@pytest.fixture
def trace(choices) -> GatingTrace:
    """Two sequences, the first of one prefill and one decode token."""
    return GatingTrace(
        experts=choices,
        num_experts=5,
        layer_ids=np.array([1, 3]),
        seq_start=np.array([0, 2]),
        is_repeat=None,
        facts={"model": "org/small", "dataset": "mmlu/anatomy"},
        phase=np.array([0, 1, 0], np.int8),
    )


@pytest.fixture
def refuses() -> Callable[..., None]:
    """Checks that a source is refused in one message that starts with its path."""

    def check(path: Path, message: str, hints: Hints = HINTS) -> None:
        with pytest.raises(TraceError, match=rf"^{re.escape(str(path))}: .*{message}") as caught:
            read_any(path, hints)
        assert "\n" not in str(caught.value)

    return check
