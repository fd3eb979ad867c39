"""A point of a study: its values by key, told apart from others by digests."""

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmoe.config.keys import is_number

Values = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """Values by key: of the axes, of what is derived from them, and always strategy and exchange.

    `content` is a digest of what the files hold that are named there.
    """

    values: Values
    content: str = ""

    @cached_property
    def hash(self) -> str:
        """A digest of the values and of the files that they name, independent of the study."""
        return digest(self._text + self.content)

    @cached_property
    def values_hash(self) -> str:
        """A digest of the values alone: the same after a file that they name has changed."""
        return digest(self._text)

    @property
    def _text(self) -> str:
        return json.dumps({key: _plain(value) for key, value in self.values.items()}, sort_keys=True)


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    """10 and 10.0 are one number."""
    return float(value) if is_number(value) else value


def comparable(value: Any) -> Hashable:
    """What equal values of a point share, as in `_plain`."""
    if type(value) in (float, int, str) or value is None:
        found: Hashable = value
        return found
    return float(value) if is_number(value) else (json.dumps(value, sort_keys=True),)
