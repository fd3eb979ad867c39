"""Whether machines state what a metric needs: energies, areas, prices."""

from collections.abc import Sequence

from jaxmoe.config import HardwareConfig, build_machine
from jaxmoe.registry import METRICS

EXAMPLES = {"energy": "link.energy_pJ_per_B", "area": "die.area_mm2", "price": "die.price"}  # of keys to state


def parts_of(names: Sequence[str]) -> dict[str, str]:
    """Parts of a machine that these metrics need, by metric; those that need none, and unknown ones, are left out."""
    return {name: part for name in names if name in METRICS and (part := METRICS[name].part)}


def unstated(names: Sequence[str], machines: Sequence[HardwareConfig]) -> str:
    """Why one of these metrics cannot be had, where no machine states its numbers; empty where all can, or there is
    no machine."""
    parts = parts_of(names)
    built = [build_machine(hardware) for hardware in machines] if parts else []
    for name, part in parts.items():
        if built and not any(map(METRICS[name].is_stated, built)):
            example = f"write for example hardware.{EXAMPLES[part]} under set, or " if part in EXAMPLES else ""
            return (
                f"the metric {name} is wanted, but no machine of the study states any {part}; {example}leave {name} out"
            )
    return ""
