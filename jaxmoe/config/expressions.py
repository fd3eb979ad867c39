"""Small arithmetic expressions over the keys of a scenario, such as `total / hardware.mesh_shape[0]`."""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any

from jaxmoe.config.base import RuleError
from jaxmoe.errors import InputError

BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
KNOWN = "numbers, quoted text, keys, + - * / **, min(), max(), comparisons, and, or, not, in brackets"
LARGEST_WHOLE = 2.0**53  # beyond it whole numbers become floats, for powers could be endless
LONGEST = 60  # characters of what errors show


class ExpressionError(InputError):
    """An expression that cannot be read or has no value. The message has the expression."""


class Expression:
    """An expression that was read from text. Its `keys` are those that it names, dots and all."""

    def __init__(self, text: str) -> None:
        """Raises `ExpressionError` where the text is no such expression."""
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ExpressionError(f"{_short(text)} is not an expression; write {KNOWN}") from None
        self.keys = tuple(dict.fromkeys(self._read(self._tree)))

    def _read(self, node: ast.AST) -> Iterator[str]:
        """Keys below a node, all of which is checked."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None) | ast.Name(id="null"):
                return
            case ast.Name() | ast.Attribute():
                yield _dotted(node, self.text)
                return
            case ast.Subscript(value=inner, slice=ast.Constant(value=int())):
                parts = [inner]
            case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
                parts = [left, right]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
                parts = [operand]
            case ast.BoolOp(values=values):
                parts = values
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARISONS for op in ops):
                parts = [left, *others]
            case ast.Call(func=ast.Name(id="min" | "max"), args=arguments, keywords=[]) if arguments:
                parts = arguments
            case _:
                raise ExpressionError(f"{_short(self.text)} has {_short(ast.unparse(node))} in it; write {KNOWN}")
        for part in parts:
            yield from self._read(part)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Its value, from values by key; numbers may be traced by JAX, but for what is compared.

        Raises `ExpressionError` where there is none, as for a division by zero.
        """
        try:
            value = self._value(self._tree, values)
        except (ArithmeticError, TypeError, IndexError) as error:
            given = ", ".join(f"{key} = {_short(values[key])}" for key in self.keys)
            raise ExpressionError(f"{_short(self.text)} has no value ({error}) where {given}; correct it") from None
        if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
            raise ExpressionError(f"{_short(self.text)} is {value}, no finite number; correct it")
        return value

    def _value(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id="null"):
                return None
            case ast.Name() | ast.Attribute():
                return values[_dotted(node, self.text)]
            case ast.Subscript(value=inner, slice=ast.Constant(value=index)):
                whole = self._value(inner, values)
                if not isinstance(whole, list | tuple) or not isinstance(index, int):
                    raise TypeError(f"{_short(whole)} is no list that {_short(index)} is a place in")
                return whole[index]
            case ast.BinOp(op=op, left=left, right=right):
                return _applied(op, self._value(left, values), self._value(right, values))
            case ast.UnaryOp(op=op, operand=operand):
                value = self._value(operand, values)
                return (not value) if isinstance(op, ast.Not) else -value if isinstance(op, ast.USub) else +value
            case ast.BoolOp(op=op, values=parts):
                each = (bool(self._value(part, values)) for part in parts)
                return all(each) if isinstance(op, ast.And) else any(each)
            case ast.Compare(left=left, ops=ops, comparators=others):
                chain = [self._value(part, values) for part in (left, *others)]
                return all(COMPARISONS[type(op)](a, b) for op, a, b in zip(ops, chain[:-1], chain[1:], strict=True))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _extreme(name, [self._value(argument, values) for argument in arguments])
        raise AssertionError(node)  # reading it refused all else


def _dotted(node: ast.AST, text: str) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner, text)}.{name}"
    raise ExpressionError(f"{_short(text)} has {_short(ast.unparse(node))} in it; write {KNOWN}")


def _applied(op: ast.operator, left: object, right: object) -> Any:
    _check_numbers(left, right)
    if isinstance(left, int) and isinstance(right, int):
        rough = BINARY[type(op)](float(left), float(right))  # too large a number is an error here, and at once
        if isinstance(rough, complex) or abs(rough) > LARGEST_WHOLE:
            return rough
    return BINARY[type(op)](left, right)


def _check_numbers(*values: object) -> None:
    for value in values:
        if value is None or isinstance(value, str | list | tuple | dict):
            raise TypeError(f"{_short(value)} is no number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _extreme(name: str, values: list[Any]) -> Any:
    _check_numbers(*values)
    if not all(isinstance(value, int | float) for value in values):
        import jax.numpy as jnp  # an expression is read before JAX is loaded

        stacked = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
        return stacked.min() if name == "min" else stacked.max()
    return min(values) if name == "min" else max(values)


def in_order(derived: Mapping[str, str | int | float]) -> list[str]:
    """Derived keys, each after those that it needs. Raises `CycleError` where they need each other."""
    needs = {key: [other for other in Expression(str(text)).keys if other in derived] for key, text in derived.items()}
    return list(TopologicalSorter(needs).static_order())


def check_expression(keys: tuple[str | int, ...], text: str) -> None:
    """Raise `RuleError` for what is no expression."""
    try:
        Expression(text)
    except ExpressionError as error:
        raise RuleError(keys, text, f"an expression ({error})", "Correct it") from None
