"""Open sections: one key names a part, shipped or registered by a user, whose settings are the other keys."""

from collections.abc import Mapping
from dataclasses import MISSING
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from jaxmoe.config.base import Section
from jaxmoe.errors import RuleError
from jaxmoe.registry import PartError, Registry
from jaxmoe.settings import Setting, SettingError, settings_of

SomeSection = TypeVar("SomeSection", bound="OpenSection")


class OpenSection(Section):
    """A section of several kinds, told apart by the key `tag`. A subclass that states `known` stands for all of them.

    Validated, it gives the section of the name that the data state: one of `known`, or one made of a part of
    `registry`, which is looked into only where none of this package has the name.
    """

    tag: ClassVar[str] = "kind"
    unstated: ClassVar[str | None] = None  # the name where the data state none
    tag_about: ClassVar[str] = "the kind"
    known: ClassVar[dict[str, Any]]
    registry: ClassVar[Registry[Any]]
    own: ClassVar[Any]  # the base of sections of registered parts
    part: ClassVar[Any]  # of a section of a registered part: its class

    @classmethod
    def of_part(cls, name: str, part: type) -> "type[OpenSection]":
        """The section of a registered part."""
        fields = setting_fields(cls.own.settings_of_part(part))
        made: Any = named_section(cls.own, name, part.__name__, part.__doc__, **fields)
        made.part = part
        return made

    @classmethod
    def settings_of_part(cls, part: type) -> dict[str, Setting]:
        """The settings of a registered class."""
        return settings_of(part)

    def values_of_part(self) -> dict[str, Any]:
        """The values of the settings of a registered part."""
        return {name: getattr(self, name) for name in self.settings_of_part(self.part)}

    @classmethod
    def is_open(cls) -> bool:
        """Whether the class stands for sections of all kinds."""
        return "known" in vars(cls)

    @classmethod
    def named(cls, name: object) -> "type[OpenSection] | None":
        """The section of this name; `None` where no part has it. Raises `RuleError` for a part that cannot be used."""
        if not isinstance(name, str) or name in cls.known:
            return cls.known.get(name) if isinstance(name, str) else None
        try:
            return _of_part(cls, name, cls.registry[name]) if name in cls.registry else None
        except (PartError, SettingError) as error:
            raise RuleError((cls.tag,), name, f"a part that can be used ({error})", "Name another one") from error

    @classmethod
    def chosen(cls, data: object) -> "type[OpenSection] | None":
        """The section for the data, which may be wrong; `None` where they state no name that there is."""
        try:
            return cls.named(data.get(cls.tag, cls.unstated)) if isinstance(data, dict) else None
        except RuleError:
            return None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All names: of this package, registered ones and those of installed packages."""
        return tuple(dict.fromkeys((*cls.known, *cls.registry.names)))

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name: sections that are made stand in no module."""
        whole = next(each for each in type(self).__mro__ if "known" in vars(each))
        return _restored, (whole, getattr(self, self.tag), self.__getstate__())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._validated) if cls.is_open() else handler(source)

    @classmethod
    def _validated(cls, data: object) -> "OpenSection":
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise PydanticKnownError("model_type", {"class_name": cls.__name__})
        name = data.get(cls.tag, cls.unstated)
        if name is None and cls.tag not in data:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": repr(cls.tag)})
        section = cls.named(name)
        if section is None:
            known = ", ".join(map(repr, cls.names()))
            tag = str(name).encode(errors="backslashreplace").decode()  # pydantic takes no half of a surrogate pair
            told = {"discriminator": repr(cls.tag), "tag": tag, "expected_tags": known}
            raise PydanticKnownError("union_tag_invalid", told)
        return section.model_validate({cls.tag: name, **data})


@lru_cache(maxsize=64)
def _of_part(section: type[OpenSection], name: str, part: type) -> type[OpenSection]:
    """One section for each part: scenarios of equal settings are equal."""
    return section.of_part(name, part)


def _restored(whole: type[OpenSection], name: str, state: dict[Any, Any]) -> OpenSection:
    section = whole.named(name)
    if section is None:
        raise PartError(f"{whole.registry.kind} {name!r} is not there; install its package here as well")
    made = section.__new__(section)
    made.__setstate__(state)
    return made


# Fields of a section, made of settings.


def setting_fields(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Type and field of every setting, as `create_model` takes them."""
    return {name: (_bounded(each), _field(each)) for name, each in settings.items()}


def named_section(
    base: type[SomeSection], name: str, title: str, about: str | None, **fields: Any
) -> type[SomeSection]:
    """A section with these fields, which its tag tells by this name."""
    tag = (Literal[name], Field(description=base.tag_about, examples=[name]))
    others: Any = {base.tag: tag, **fields}
    return create_model(title, __base__=base, __module__=base.__module__, __doc__=about, **others)


def _bounded(setting: Setting) -> Any:
    """The type with its bounds, which hold for values that are not null."""
    about, inner = setting.about, setting.type
    optional = type(None) in get_args(inner)
    if optional:
        inner = next(each for each in get_args(inner) if each is not type(None))
    bounds = {"gt": about.above, "ge": about.at_least, "lt": about.below, "le": about.at_most}
    stated: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound is not None}
    if inner is str:
        stated["min_length"] = 1
    if get_origin(inner) is tuple:
        stated["strict"] = False  # strict mode would refuse the list that YAML gives; the entries stay strict
    bounded = Annotated[inner, Field(**stated)] if stated else inner
    return bounded | None if optional else bounded


def _field(setting: Setting) -> Any:
    about = setting.about
    told: dict[str, Any] = {} if about.example is None else {"examples": [about.example]}
    if about.description:
        told["description"] = about.description
    return Field(**told) if setting.default is MISSING else Field(default=setting.default, **told)
