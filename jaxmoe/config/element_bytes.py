"""Bytes of one element in a scenario: those of its model, but for what its costs state."""

from dataclasses import dataclass, replace

from jaxmoe.config.model import build_model
from jaxmoe.config.schema import Scenario
from jaxmoe.models import ElementBytes
from jaxmoe.models.element_bytes import UNQUANTISED, Number


@dataclass(frozen=True)
class ScenarioBytes(ElementBytes):
    """Bytes of one element by kind of data; hidden vectors may have others on their way to experts and back."""

    dispatch: Number = UNQUANTISED
    combine: Number = UNQUANTISED

    def told(self) -> str:
        """All of them in a line, for the head of a table."""
        ways = f" (dispatch {self.dispatch:g}, combine {self.combine:g})" if self.dispatch != self.combine else ""
        return (
            f"bytes: experts {self.experts:g}, dense {self.dense:g}, attention {self.attention:g}, "
            f"activations {self.activations:g}{ways}, KV {self.kv:g}"
        )


def element_bytes(scenario: Scenario) -> ScenarioBytes:
    """Bytes of one element by kind of data."""
    model, costs = build_model(scenario.model).bytes, scenario.costs
    if costs.weight_bytes_per_element is not None:
        weight = costs.weight_bytes_per_element
        model = replace(model, experts=weight, dense=weight, attention=weight)
    if costs.bytes_per_element is not None:
        model = replace(model, activations=costs.bytes_per_element, kv=costs.bytes_per_element)
    ways = (costs.dispatch_bytes_per_element, costs.combine_bytes_per_element)
    dispatch, combine = (model.activations if own is None else own for own in ways)
    return ScenarioBytes(**vars(model), dispatch=dispatch, combine=combine)
