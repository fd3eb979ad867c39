"""Composition of systems: the keys that choose each part of a system, or why the system has no such part.

`python -m jaxmoe.config.composition` prints the table of README.md and the text about it in configs/README.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxmoe.config.machine import HardwareConfig
from jaxmoe.config.systems import SystemConfig
from jaxmoe.errors import RuleError
from jaxmoe.methods.settings import METHODS, PARTS, STATEMENTS, SystemSettings, described
from jaxmoe.methods.settings.base import HOMES, WHOLE
from jaxmoe.registry import STRATEGIES
from jaxmoe.settings import Setting


@dataclass(frozen=True)
class Part:
    """The keys of a part, the first of which chooses it, and which choices suit the system; or why it has none.

    Keys with a dot, and `schedule`, are of the scenario, all others of its section `system`.
    """

    keys: tuple[str, ...] = ()
    goes: str = ""
    why_not: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The keys from the top of the scenario."""
        return tuple(key if "." in key or key == "schedule" else f"system.{key}" for key in self.keys)


FURTHER = "further settings"  # of a user's system, which name no part
SCHEDULES = {
    "any": "any",
    "whole_batches": "any without micro-batches, since decisions are of whole batches",
}
# Texts for a system that states none.
USUAL = {
    "placement": "any",
    "exchange": "any that the machine can have; a plan's own comes first",
    "gate": HOMES,
}


def composition(name: str) -> dict[str, Part]:
    """The parts of a system by name. Raises `UnknownPartError` where there is none."""
    stated, settings = described(name)
    parts = {part: _part(part, stated, settings) for part in PARTS}
    further = tuple(key for key, each in settings.items() if each.about.part not in PARTS)
    return parts | ({FURTHER: Part(further, "as its author says")} if further else {})


def _part(name: str, stated: type[SystemSettings], settings: dict[str, Setting]) -> Part:
    of_scenario = {
        "placement": ("plan",) if stated.plan is not None else (),
        "exchange": ("costs.exchange",) if stated.takes_exchange else (),
        "gate": ("gate",) if stated.takes_gate else (),
        "schedule": ("schedule",) if stated.schedules in SCHEDULES else (),
    }
    own = tuple(key for key, each in settings.items() if each.about.part == name)
    keys = (*of_scenario.get(name, ()), *own)
    if not keys:
        return Part(why_not=stated.why_not.get(name, "its author states none"))
    usual = {**USUAL, "schedule": SCHEDULES.get(stated.schedules, "")}
    if stated.whole_experts:
        usual["placement"] = WHOLE
    return Part(keys, stated.goes.get(name, usual.get(name, "as its settings say")))


COMPOSITION = {name: composition(name) for name in STATEMENTS}  # of the systems of this package

WHOLE_EXPERTS = ("ep", "ep_balanced", "ep_random", "ep_runs")  # strategies that leave experts whole
REGIONS = next(name for name in STRATEGIES.builtin if name.startswith("regions_"))
DIVIDING = ("tp", "tp_both_ways", "hybrid", "hybrid_ring", "hybrid_complete", REGIONS)


def part_of(key: str) -> str:
    """The name of the part that a key of `system` belongs to in some system, or an empty string."""
    return next((part for parts in COMPOSITION.values() for part in parts if key in parts[part].keys), "")


def foreign_key(system: str, key: str) -> str:
    """Why this system has no such key, where others have; nothing where none has it, or the system is not known."""
    part = part_of(key)
    if not part or system not in METHODS:
        return ""
    own = composition(system)[part]
    instead = (
        f"Its {part} is named by {', '.join(own.paths)}" if own.keys else f"It has no {part} to name: {own.why_not}"
    )
    others = [name for name, parts in COMPOSITION.items() if key in parts[part].keys]
    return f"is a key of {', '.join(others)}, not of {system}. {instead}"


def check_together(system: SystemConfig, schedule: str, micro_batches: int, plan_divides: bool) -> None:
    """Whether the parts that a scenario names go together. `plan_divides`: its plan has parts of experts on nodes.

    Raises `RuleError`.
    """
    stated, name = system.stated, system.name
    if schedule != "serial" and stated.schedules == "own":
        why = composition(name)["schedule"].why_not
        raise RuleError(("schedule",), schedule, f"serial with system {name}: {why}", "Leave the key out")
    if micro_batches > 1 and stated.schedules == "whole_batches":
        expected = f"a schedule without micro-batches with system {name}, which decides for whole batches"
        raise RuleError(("schedule",), schedule, expected, "Write serial, overlap or idle_links")
    if plan_divides and stated.needs_whole_experts:
        remedy = f"Write one of {', '.join(WHOLE_EXPERTS)}, or the path of such a plan"
        raise RuleError(("system", "plan"), system.plan, f"{WHOLE}, with system {name}", remedy)


def check_network(system: SystemConfig, hardware: HardwareConfig) -> None:
    """Whether a system goes with the network of a machine. Raises `RuleError`."""
    stated, name = system.stated, system.name
    if not stated.suits_network(hardware.is_mesh, hardware.switched is not None):
        others = ", ".join(other for other, each in STATEMENTS.items() if not each.networks)
        expected = f"a system for a {hardware.kind}: {name} {stated.networks}"
        raise RuleError(("system", "name"), name, expected, f"Write one of {others}")
    try:
        stated.check_network(hardware.kind, hardware.is_mesh)
    except RuleError as error:
        raise RuleError(("system", *error.keys), error.value, error.expected, error.remedy) from None


def table(names: Iterable[str] = STATEMENTS) -> str:
    """Systems by part, as Markdown: the key that chooses a part, or a dash where the system fixes it."""
    systems = {name: composition(name) for name in names}
    head = ["part", *(f"`{name}`" for name in systems)]
    lines = [_row(head), _row(["---"] * len(head))]
    for part, about in PARTS.items():
        cells = [_chosen_by(parts[part]) for parts in systems.values()]
        lines.append(_row([f"{part}: {about}", *cells]))
    return "\n".join(lines)


def _chosen_by(part: Part) -> str:
    return f"`{part.keys[0]}`" if part.keys else "-"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def details(names: Iterable[str] = STATEMENTS) -> str:
    """All keys of every part of every system and what goes with it, or why there is none, as Markdown."""
    return "\n\n".join("\n".join(_details_of(name)) for name in names)


def _details_of(name: str) -> Iterator[str]:
    yield f"### {name}\n"
    for part, own in composition(name).items():
        keys = ", ".join(f"`{key}`" for key in own.paths)
        yield f"- {part}: {keys}: {own.goes}." if keys else f"- no {part} to name: {own.why_not}."


if __name__ == "__main__":
    print(f"{table(METHODS.names)}\n\n{details(METHODS.names)}")
