"""Expressions over keys: arithmetic as Python has it, and nothing else."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config.expressions import Expression, ExpressionError

VALUES = {"a": 3, "b.c": 4.0, "shape": [2, 8], "name": "tp", "nothing": None, "die": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + 2 * b.c", 11),
        ("-a ** 2", -9),
        ("(a - 1) / b.c", 0.5),
        ("min(a, b.c, 2) + max(a, b.c)", 6),
        ("shape[0] * shape[1]", 16),
        ("a < b.c <= 4 and not a > 5", True),
        ("name == 'tp' or a == 0", True),
        ("name != 'tp'", False),
        ("1e3", 1000),
        ("nothing == null and nothing == None and a != null", True),
    ],
)
def test_value_by_hand(text, value):
    assert Expression(text)(VALUES) == value


def test_keys_are_those_that_are_named():
    assert Expression("max(a, b.c) + a * shape[1]").keys == ("a", "b.c", "shape")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a +",
        "__import__('os')",
        "a.b()",
        "[a]",
        "a if a else b",
        "lambda: a",
        "open('x')",
        "a[b]",
        "a // 2",
        "f'{a}'",
    ],
)
def test_what_is_no_such_expression_is_refused(text):
    with pytest.raises(ExpressionError, match=r"write numbers|not an expression"):
        Expression(text)


@pytest.mark.parametrize("text", ["a / 0", "a + name", "shape[5]", "9 ** 99999", "(0 - a) ** 0.5", "-name"])
def test_without_a_value(text):
    with pytest.raises(ExpressionError):
        Expression(text)(VALUES)


@pytest.mark.parametrize(
    "text",
    [
        "die[0]",
        "a ** 900",
        "1e308 * 10",
        "((9 ** 1000) ** 1000) ** 1000",
        "shape * 1000000",
        "min(shape, 3)",
        "nothing + 1",
        " + ".join(["name"] * 99),
    ],
)
def test_what_is_too_large_or_no_number_is_one_short_error(text):
    with pytest.raises(ExpressionError) as error:
        Expression(text)(VALUES)
    assert len(str(error.value)) < 200


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_gradients_pass(x, y):
    slope = jax.grad(lambda x: Expression("x * y + max(x, 100)")({"x": x, "y": y}))(x)
    assert slope == pytest.approx(y, rel=1e-5)
