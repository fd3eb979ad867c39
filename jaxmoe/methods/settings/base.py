"""Facts and rules that a system states beside its settings, parts that all are made of, and the static system's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

PARTS = {
    "placement": "where experts stay",
    "token layout": "where tokens live between layers",
    "attention": "what comes before the experts",
    "exchange": "how hidden vectors get to experts and back",
    "gate": "what changes the choices of tokens",
    "assignment": "who computes which choice",
    "movement": "which weights travel, and when",
    "balancer": "what places copies anew",
    "schedule": "how stages follow each other",
}

# Texts that several systems share: what goes with a part, and why there is none.
SPREAD = "tokens are spread evenly over the nodes, in their order"
UNTIMED = "the MoE layer alone is timed"
WHOLE = "whole experts, one node each"
BIAS = "a bias by what paths cost"
HOMES = f"{BIAS}, under exchanges from and to a token's home, token_home and its trees"
AS_PLACED = "experts are computed where the plan has them"

Schedules = Literal["any", "whole_batches", "own"]


@dataclass(frozen=True)
class SystemSettings:
    """Settings of a system, the fields of a subclass; its facts, as class variables; and rules between its settings.

    `goes` says of each part that can be named what goes with the system, `why_not` of each other part why there is
    none. A key is named by the `part` of its setting; the plan, the exchange and the schedule of a scenario and the
    gate before a system follow from the facts. No JAX is imported by modules of statements.
    """

    name: ClassVar[str] = ""
    made_by: ClassVar[str] = ""  # the class that does it, module:name
    plan: ClassVar[str | None] = "ep_balanced"  # the one to start from by default; None: it takes no plan
    whole_experts: ClassVar[bool] = False  # whether the plan has to have every expert on one node
    takes_exchange: ClassVar[bool] = True  # whether vectors go by the exchange of the scenario or plan
    serves_copies: ClassVar[bool] = False  # whether experts of the plan may have copies, of which a rule names one
    takes_gate: ClassVar[bool] = False  # whether tokens go to experts at places, so that a gate can price the way
    schedules: ClassVar[Schedules] = "whole_batches"
    keeps_requests: ClassVar[bool] = False  # whether successive batches are of the same requests, row by row
    networks: ClassVar[str] = ""  # what it does on which networks, where it does not suit all; see `suits_network`
    goes: ClassVar[Mapping[str, str]] = {}
    why_not: ClassVar[Mapping[str, str]] = {}

    @property
    def needs_whole_experts(self) -> bool:
        """Whether the plan has to have every expert on one node with these settings."""
        return self.whole_experts

    def check(self) -> None:
        """Raise `RuleError` where settings do not go together, with keys from the section of the system."""

    @classmethod
    def suits_network(cls, is_mesh: bool, has_switches: bool) -> bool:
        """Whether the system goes with a network; `has_switches`: nodes stand around switches of their own."""
        return True

    def check_network(self, kind: str, is_mesh: bool) -> None:
        """Raise `RuleError` where settings do not go with a network, with keys from the section of the system."""


FACTS = tuple(name for name in SystemSettings.__annotations__)


@dataclass(frozen=True)
class StaticSettings(SystemSettings):
    """The plan as it is, in every iteration."""

    name = "static"
    made_by = "jaxmoe.methods.static:Static"
    serves_copies = True
    takes_gate = True
    schedules = "any"
    goes = {"placement": "any", "gate": HOMES}  # noqa: RUF012
    why_not = {  # noqa: RUF012
        "token layout": SPREAD,
        "attention": UNTIMED,
        "assignment": AS_PLACED,
        "movement": "no weights travel",
        "balancer": "the plan stays as it is",
    }
