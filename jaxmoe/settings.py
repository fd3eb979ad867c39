"""Settings of a part, stated once: default, bounds, unit and help beside the type of a dataclass's field.

    @dataclass(frozen=True)
    class Hottest(AbstractSystem):
        experts: int = setting(2, help="the number of experts that are copied", at_least=1)
        wait_us: float = setting(0.0, help="the time between two decisions", unit="us", at_least=0)

The section of a configuration file, the explained file of `jaxmoe init` and error messages are made of this. A field
without `setting` is one as well, with its type and default alone. No JAX is imported here.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxmoe.errors import InputError

_STATED = "jaxmoe setting"  # among the metadata of a field
_PLAIN = (bool, int, float, str)
_OF_ARRAYS = {"float": float, "int": int, "bool": bool}  # by the start of a type's name


class SettingError(InputError):
    """A field that cannot be a setting, or settings that cannot be read, with the reason and the remedy."""


@dataclass(frozen=True)
class About:
    """Help, unit, bounds, example and part of a setting: all but its type and default."""

    help: str = ""  # a noun phrase: messages put it after "Write"
    unit: str = ""
    null: str = ""  # the meaning of null, after "or null"
    above: int | float | None = None
    at_least: int | float | None = None
    below: int | float | None = None
    at_most: int | float | None = None
    example: Any = None
    part: str = ""  # the part of a system that it belongs to

    @property
    def description(self) -> str:
        """Help with the unit and the meaning of null."""
        unit = f" in {self.unit}" if self.unit else ""
        null = f", or null {self.null}" if self.null else ""
        return f"{self.help}{unit}{null}"


@dataclass(frozen=True)
class Setting:
    """A setting of a part. Its type is bool, int, float, str, a `Literal`, a tuple of these, or one of them or None.

    `default` is `MISSING` where one has to be given. `swept`: whether JAX gets it as an array.
    """

    name: str
    type: Any
    default: Any
    about: About
    swept: bool = False

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal`, none for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def setting(default: Any = MISSING, *, static: bool = False, **about: Any) -> Any:
    """A field of a dataclass or an `equinox.Module` that is a setting.

    `about` are fields of `About`: help, unit, null, above, at_least, below, at_most, example, part. A `static` field of
    a module is no leaf of it. One without a default is given by keyword.
    """
    metadata = {_STATED: About(**about)} | ({"static": True} if static else {})
    return dataclasses.field(default=default, kw_only=default is MISSING, metadata=metadata)


def settings_of(kind: type, beyond: type = object) -> dict[str, Setting]:
    """The settings of a part by name: the fields that its constructor takes, but for those of the class `beyond`.

    Fields that a class names in its `given` come from the run and are no settings.

    Raises `SettingError` where a field's type cannot be written in a configuration file.
    """
    if not dataclasses.is_dataclass(kind):
        return {}
    theirs = {field.name for field in dataclasses.fields(beyond)} if dataclasses.is_dataclass(beyond) else set()
    theirs |= set(getattr(kind, "given", ()))
    own = [field for field in dataclasses.fields(kind) if field.init and field.name not in theirs]
    try:
        hints = get_type_hints(kind, include_extras=True) if own else {}
    except NameError as error:
        raise SettingError(
            f"the types of {kind.__qualname__} cannot be read ({error}); import them where it is"
        ) from None
    module = any(base.__module__.startswith("equinox") for base in kind.__mro__)
    return {field.name: _setting(kind, field, hints[field.name], module) for field in own}


def _setting(kind: type, field: "dataclasses.Field[Any]", annotation: Any, module: bool) -> Setting:
    plain = _plain(annotation)
    if plain is None:
        raise SettingError(
            f"{kind.__qualname__}.{field.name} is {annotation}, expected a type that YAML can hold: bool, int, float, "
            "str, Literal, a tuple of these, or one of them or None; give it init=False if it is no setting"
        )
    default = field.default if field.default_factory is MISSING else field.default_factory()
    swept = module and not field.metadata.get("static", False) and float in (plain, *get_args(plain))
    return Setting(field.name, plain, default, field.metadata.get(_STATED, About()), swept)


def _plain(annotation: Any) -> Any:
    """The type as YAML has it: a scalar array of JAX is a number. `None` where YAML has none."""
    if annotation in _PLAIN or get_origin(annotation) is Literal:
        return annotation
    if getattr(annotation, "dim_str", None) == "":  # of jaxtyping, as Float[Array, ""]
        name = annotation.dtypes[0] if annotation.dtypes else ""
        return next((plain for start, plain in _OF_ARRAYS.items() if name.startswith(start)), None)
    arguments = get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        inner = _plain(next(each for each in arguments if each is not type(None)))
        return None if inner is None else inner | None
    if get_origin(annotation) is tuple:
        entries = [each if each is Ellipsis else _plain(each) for each in arguments]
        return None if None in entries else tuple[tuple(entries)]  # type: ignore[misc]
    return None


def made(kind: Callable[..., Any], values: Mapping[str, Any], settings: Mapping[str, Setting], **others: Any) -> Any:
    """Build the part with these values of its settings. `swept` numbers become float32 arrays for JAX."""
    numbers = {name for name, each in settings.items() if each.swept and values.get(name) is not None}
    if not numbers:
        return kind(**others, **values)
    import jax.numpy as jnp

    arrays = {name: jnp.asarray(values[name], jnp.float32) for name in numbers}
    return kind(**others, **{**values, **arrays})
