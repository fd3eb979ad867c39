"""Numbers of a layer model by name, each addressed by the key paths of the leaves that it changes.

A rate, a latency or an energy may take any value in between; a size, a count or a seed gives the model another form.
Which is which is found by building the model with that number traced by JAX: a leaf that depends on it is traced as
well, and Python cannot take it for a size, nor decide by it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine import Layer
from jaxmoe.errors import InputError

Number = float | Float[Array, ""]
Build = Callable[[Mapping[str, Number]], Any]  # a pytree with other numbers by name, which JAX may trace
KeyPaths = tuple[str, ...]  # of leaves, as `jax.tree_util.keystr` writes them: .machine.topology.link_bandwidth


class StructuralNumberError(InputError):
    """A number that something has its form from: a size, a count, a seed, or one that is decided by."""


def leaves_of(build: Build, name: str, value: float) -> KeyPaths:
    """Key paths of the leaves that depend on the number of a name.

    Raises `StructuralNumberError` where the structure of what is built depends on the number, or Python needs to know
    its value; and whatever `build` raises without other numbers.
    """
    form: Any = jax.tree.structure(build({}))
    found: list[KeyPaths] = []

    def traced(number: Number) -> Number:
        tree = build({name: number})
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        found.append(tuple(jax.tree_util.keystr(path) for path, leaf in leaves if isinstance(leaf, jax.core.Tracer)))
        if jax.tree.structure(tree) != form:
            raise TypeError(f"fields that are no arrays depend on {name}")
        return number

    try:
        with warnings.catch_warnings(action="ignore"):  # pydantic's, of what is no plain number any more
            jax.vmap(traced)(jnp.full(2, value, jnp.float32))  # traces what depends on the number, and nothing else
    except (TypeError, InputError) as error:  # JAX's and NumPy's of what is no plain number
        raise StructuralNumberError(f"{name} is a size or a count, or something is decided by it") from error
    return found[0]


@dataclass(frozen=True, eq=False)
class ModelNumbers:
    """A layer model as a function of numbers by name.

    `build` makes the model with other numbers by name; `leaves` are those that each number changes.
    """

    build: Build
    leaves: Mapping[str, KeyPaths]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.leaves)

    @property
    def changed(self) -> frozenset[str]:
        """Key paths of all leaves that some number changes."""
        return frozenset(path for paths in self.leaves.values() for path in paths)

    def model(self, numbers: Float[Array, " name"], fixed: Layer) -> Layer:
        """The model at these numbers, in the order of `names`; all other leaves are those of `fixed`."""
        built = self.build(dict(zip(self.names, numbers, strict=True)))
        changed, leaves = self.changed, jax.tree.leaves(built)
        paths, _ = jax.tree_util.tree_flatten_with_path(fixed)
        pairs = zip(paths, leaves, strict=True)
        mixed = [new if jax.tree_util.keystr(path) in changed else old for (path, old), new in pairs]
        return jax.tree.unflatten(jax.tree.structure(fixed), mixed)


def model_numbers(build: Build, values: Mapping[str, float]) -> ModelNumbers:
    """The model as a function of these numbers. Raises `StructuralNumberError` for one that is no plain number."""
    return ModelNumbers(build, {name: leaves_of(build, name, value) for name, value in values.items()})
