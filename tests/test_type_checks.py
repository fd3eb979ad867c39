"""Types and shapes really are checked while tests run, however the checks are made."""

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped

from jaxmoe.des.fabric import _starts


def adder():
    @jaxtyped(typechecker=beartype)
    def add(left: Float[np.ndarray, " node"], right: Float[np.ndarray, " node"]) -> Float[np.ndarray, " node"]:
        return np.concatenate([left + right, right[:0] if left.sum() else right])

    return add


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_arguments_and_results_of_functions_inside_others(first):
    left, right = np.array([first, 0.0]), np.ones(2)
    for add in (adder(), adder()):  # one definition, two functions
        with pytest.raises(TypeCheckError):
            add(left, np.ones(3))
        with pytest.raises(TypeCheckError):
            add(left, right.astype(int))
        if first:
            np.testing.assert_array_equal(add(left, right), [2, 1])
        else:
            with pytest.raises(TypeCheckError, match=r"result|return"):
                add(left, right)


def test_arguments_of_the_package():
    np.testing.assert_array_equal(_starts(np.array([2, 0, 3])), [0, 2, 2, 5])
    with pytest.raises(TypeCheckError):
        _starts(np.zeros((2, 2), int))
