"""Types and shapes of arguments and results are checked in tests by jaxtyping and beartype; here at less cost.

jaxtyping writes two functions that check for every definition, anew whenever a function inside another is defined, and
checks arguments before a call and again with its result. Here they are written when a function is first called, once
for all functions that one definition makes, and check arguments once. What is checked is the same.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import jaxtyping
from jaxtyping import _decorator as inner
from jaxtyping._storage import pop_shape_memo, push_shape_memo

EMPTY = inspect.Signature.empty


class Checks(NamedTuple):
    """Functions that raise for wrong arguments, and for a wrong result."""

    arguments: Callable[..., Any]
    result: Callable[..., Any] | None
    code: CodeType  # kept, for its number names these checks


WRITTEN: dict[int, Checks] = {}
by_jaxtyping = inner.jaxtyped


def written(fn: FunctionType, typechecker: Callable) -> Checks:
    """The checks of all functions that are made from the code of this one."""
    if id(fn.__code__) not in WRITTEN:
        signature = inspect.signature(fn)
        meant = functools.partial(inner._destring_annotation, ns=fn.__globals__)
        given = [each.replace(annotation=meant(each.annotation)) for each in signature.parameters.values()]
        named = fn.__name__, fn.__qualname__, fn.__module__
        arguments = inner._make_fn_with_signature(*named, inspect.Signature(given), output=False)
        result = None
        if signature.return_annotation is not EMPTY:
            returned = inspect.Signature(return_annotation=meant(signature.return_annotation))
            result = typechecker(inner._make_fn_with_signature(*named, returned, output=True)[0])
        WRITTEN[id(fn.__code__)] = Checks(typechecker(arguments), result, fn.__code__)
    return WRITTEN[id(fn.__code__)]


def checked(fn: Any = None, *, typechecker: Callable) -> Any:
    """In place of `jaxtyping.jaxtyped`."""
    if fn is None:
        return functools.partial(checked, typechecker=typechecker)
    if inspect.isclass(fn) and hasattr(fn.__init__, "checks_types"):
        return fn
    if not isinstance(fn, FunctionType):
        return by_jaxtyping(fn, typechecker=typechecker)
    checks = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal checks
        if checks is None:
            checks = written(fn, typechecker)
        push_shape_memo({})
        try:
            try:
                checks.arguments(*args, **kwargs)
            except Exception:  # told as jaxtyping tells it
                return by_jaxtyping(fn, typechecker=typechecker)(*args, **kwargs)
            out = fn(*args, **kwargs)
            if checks.result is not None:
                try:
                    checks.result(ret0=out)
                except Exception as error:
                    raise jaxtyping.TypeCheckError(f"result of {fn.__module__}.{fn.__qualname__}: {error}") from error
            return out
        finally:
            pop_shape_memo()

    call.checks_types = True
    return call


def install() -> None:
    """For all that is imported from now on."""
    jaxtyping.jaxtyped = inner.jaxtyped = checked
