"""Numbers from one end to the other, as axes of studies and variables of hardware spaces have them."""

from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator

from jaxmoe.config.base import RuleError, Section

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# Strict mode would refuse the list that YAML gives; the entries stay strict.
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class RangeConfig(Section):
    """Numbers from one end to the other."""

    start: float = Field(alias="from", description="the first number", examples=[10])
    stop: float = Field(alias="to", description="the last number", examples=[100])
    points: Count | None = Field(default=None, description="how many numbers a grid has", examples=[5])
    scale: Literal["linear", "log"] = Field(
        default="linear", description="whether equal steps are differences or ratios", examples=["log"]
    )

    @model_validator(mode="after")
    def _has_a_logarithm(self) -> "RangeConfig":
        if self.scale == "log" and min(self.start, self.stop) <= 0:
            raise RuleError(("scale",), self.scale, "linear where an end is not above 0", "Raise the end")
        return self

    def at(self, part: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """The numbers at these fractions of the range, 0 to 1, on a linear or logarithmic scale."""
        if self.scale == "log":
            values = self.start * (self.stop / self.start) ** part
        else:
            values = self.start + (self.stop - self.start) * part
        ends = np.where(part == 0, self.start, np.where(part == 1, self.stop, values))  # as written, not rounded
        return ends.astype(float)

    def parts(self, numbers: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """The fractions of the range at which numbers lie, 0 to 1; all 0 where both ends are equal."""
        ends = np.array([self.start, self.stop])
        if self.scale == "log":
            ends, numbers = np.log(ends), np.log(numbers)
        return (numbers - ends[0]) / ((ends[1] - ends[0]) or 1.0)
