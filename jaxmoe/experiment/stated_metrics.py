"""Whether machines state what a metric needs: energies, areas, prices."""

from collections.abc import Sequence

from jaxmoe.config import HardwareConfig, build_machine
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import METRICS

EXAMPLES = {"energy": "link.energy_pJ_per_B", "area": "die.area_mm2", "price": "die.price"}  # of keys to state


class UnstatedError(InputError):
    """A metric that is wanted and that no machine states the numbers for."""


def parts_of(names: Sequence[str]) -> dict[str, str]:
    """Parts of a machine that these metrics need, by metric; those that need none, and unknown ones, are left out."""
    return {name: part for name in names if name in METRICS and (part := METRICS[name].part)}


def check_stated(label: str, names: Sequence[str], machines: Sequence[HardwareConfig]) -> None:
    """Raise `UnstatedError` for a metric whose numbers none of these machines states; `label` names the study."""
    parts = parts_of(names)
    built = [build_machine(hardware) for hardware in machines] if parts else []
    for name, part in parts.items():
        if built and not any(map(METRICS[name].is_stated, built)):
            raise UnstatedError(
                f"{label}: the metric {name} is wanted, but no machine of the study states any {part}; write for "
                f"example hardware.{EXAMPLES[str(part)]} under set, or leave {name} out"
            )
