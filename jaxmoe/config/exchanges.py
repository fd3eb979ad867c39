"""Names of exchanges in configuration files."""

from typing import Annotated

from pydantic import AfterValidator

from jaxmoe.config.base import RuleError
from jaxmoe.placement.exchange import KNOWN, ExchangeError, exchange_of


def check_known(name: str) -> str:
    """The name of an exchange; whether it suits the machine is found when that is built."""
    try:
        exchange_of(name)
    except ExchangeError:
        raise RuleError((), name, f"one of {KNOWN}", "Write one of them") from None
    return name


ExchangeName = Annotated[str, AfterValidator(check_known)]
