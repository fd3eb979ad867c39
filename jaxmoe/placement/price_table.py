"""Link prices of a plan: what tokens pay for every link under the exchanges `priced`, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxmoe.errors import PlanError
from jaxmoe.placement.exchange import Exchange, ExchangeError, PricedLinks, exchange_of


@dataclass(frozen=True, eq=False)
class PriceTable:
    """A price of 0 or more for every link of a machine, and how softly tokens choose by them, float32.

    Each layer has its own; layers under other exchanges make no use of theirs.
    """

    price: Float[np.ndarray, "layer link"]
    softness: Float[np.ndarray, " layer"]

    def __post_init__(self) -> None:
        try:
            for row in range(len(self.price)):
                self.described("priced", row)
        except ExchangeError as error:
            raise PlanError(str(error)) from None

    def described(self, name: str, row: int) -> Exchange | str:
        """The exchange of this name with the prices of a layer, if it goes by prices; else the name."""
        exchange = exchange_of(name)
        if not isinstance(exchange, PricedLinks):
            return name
        return PricedLinks(exchange.meeting, tuple(self.price[row].tolist()), float(self.softness[row]))

    def rows(self, rows: Sequence[int]) -> "PriceTable":
        """The prices of these layers alone."""
        return PriceTable(self.price[list(rows)], self.softness[list(rows)])

    def arrays(self) -> dict[str, np.ndarray]:
        """The table as arrays of a plan file, by name."""
        return {
            "exchange_price": self.price.astype(np.float32),
            "exchange_softness": self.softness.astype(np.float32),
        }


def prices_of_arrays(arrays: dict[str, np.ndarray]) -> PriceTable | None:
    """The table in the arrays of a plan file, if there is one. Raises `PlanError` for a bad one."""
    names = ("exchange_price", "exchange_softness")
    there = [name for name in names if name in arrays]
    if not there:
        return None
    if len(there) == 1:
        (missing,) = set(names) - set(there)
        raise PlanError(f"has {there[0]} and no {missing}; write the plan again")
    price, softness = (arrays[name] for name in names)
    if price.ndim != 2 or price.dtype.kind != "f":
        raise PlanError(f"exchange_price is {price.dtype} of shape {price.shape}, expected floats [layer, link]")
    if softness.shape != price.shape[:1] or softness.dtype.kind != "f":
        raise PlanError(
            f"exchange_softness is {softness.dtype} of shape {softness.shape}, expected a float for each of the "
            f"{len(price)} layers of exchange_price"
        )
    return PriceTable(price, softness)
