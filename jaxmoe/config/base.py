"""Base class of the sections of configuration files, types of their fields, and numbers by dotted key."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from jaxmoe.errors import InputError
from jaxmoe.errors import RuleError as RuleError
from jaxmoe.placement.exchange import EXCHANGES


class Section(BaseModel):
    """A mapping of a configuration file: immutable, without unknown keys, and without silent conversions.

    A whole number is accepted where a number is expected; text never is. NaN and infinity are refused.
    Descriptions of fields are noun phrases: error messages put them after "Write".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ConfigError(InputError):
    """A configuration that cannot be used. The message names the place, the value and the remedy.

    `written_in`: the labels of the files or options that have the wrong values, where that is known.
    """

    def __init__(self, message: str, written_in: Collection[str] = ()) -> None:
        super().__init__(message)
        self.written_in = frozenset(written_in)


Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
# JAX and NumPy both take 32 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
SMALLEST = 1e-12


def _not_tiny(value: float) -> float:
    """Refuse a value below `SMALLEST`: as a divisor it could become zero in float32 once converted to SI units."""
    if value < SMALLEST:
        raise RuleError((), value, f"at least {SMALLEST:g}", "Write a larger number")
    return value


# No machine comes near 1e9 of these units: such a value was written in B/s, B or FLOP/s.
Rate = Annotated[float, Field(gt=0, le=1e9), AfterValidator(_not_tiny)]
Portion = Annotated[float, Field(gt=0, le=1), AfterValidator(_not_tiny)]
Latency = Annotated[float, Field(ge=0, le=1e12)]  # ns
Amount = Annotated[float, Field(ge=0, le=1e12)]  # of energy, power, area or money


def pair_of(what: str, example: str) -> BeforeValidator:
    """Take a pair as a whole: pydantic would report a short list as a missing second entry."""

    def as_pair(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise RuleError((), value, f"two {what} in brackets", f"Write them as {example}")
        return tuple(value)

    return BeforeValidator(as_pair)


# Numbers of a section by dotted key; entries of a list are named by their `name`, as in memory.hbm.latency_ns.

SomeSection = TypeVar("SomeSection", bound=Section)


def with_numbers(section: SomeSection, numbers: Mapping[str, Any]) -> SomeSection:
    """The section with other numbers, which are not validated and may be traced by JAX."""
    below: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    for key, value in numbers.items():
        name, _, rest = key.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    for name, inner in below.items():
        update[name] = _inner_with_numbers(getattr(section, name), inner)
    return section.model_copy(update=update)


def _inner_with_numbers(part: Any, numbers: Mapping[str, Any]) -> Any:
    if not isinstance(part, tuple):
        return with_numbers(part, numbers)
    own = {
        entry.name: {key.partition(".")[2]: value for key, value in numbers.items() if key.split(".")[0] == entry.name}
        for entry in part
    }
    return tuple(with_numbers(entry, own[entry.name]) for entry in part)


def number_at(section: Section, key: str) -> float:
    """The number that a section has at a dotted key. Raises `ConfigError` for null."""
    node: Any = section
    for name in key.split("."):
        node = next(entry for entry in node if entry.name == name) if isinstance(node, tuple) else getattr(node, name)
    if node is None:
        raise ConfigError(f"{key} is null; expected a number to start from. Write one with --set {key}=NUMBER.")
    return float(node)


# Names of exchanges in configuration files.


def check_known(name: str) -> str:
    """The name of an exchange; whether it suits the machine is found when that is built."""
    if name not in EXCHANGES:
        raise RuleError((), name, f"one of {EXCHANGES.shown()}", "Write one of them")
    return name


ExchangeName = Annotated[str, AfterValidator(check_known)]
