"""What combines with what: the keys that name each part of a system, or why the system has no such part.

`python -m jaxmoe.config.parts` prints the table of README.md and what configs/README.md says beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmoe.config.base import RuleError

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


@dataclass(frozen=True)
class Part:
    """The keys that name a part, the first of which chooses it, and what goes with the system; or why there is none.

    Keys with a dot, and `schedule`, are of the scenario, all others of its section `system`.
    """

    keys: tuple[str, ...] = ()
    goes: str = ""
    why_not: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The keys from the top of the scenario."""
        return tuple(key if "." in key or key == "schedule" else f"system.{key}" for key in self.keys)


def _none(why: str) -> Part:
    return Part(why_not=why)


SPREAD = _none("tokens are spread evenly over the nodes, in their order")
UNTIMED = _none("the MoE layer alone is timed")
HOMES = "under exchanges from and to a token's home, token_home and its trees"
WHOLE = "whole experts, one node each"
ANY_EXCHANGE = Part(("costs.exchange",), "any that the machine can have; a plan's own comes first")
NO_MICRO_BATCHES = Part(("schedule",), "any without micro-batches, since decisions are of whole batches")

COMPOSITION: dict[str, dict[str, Part]] = {
    "static": {
        "placement": Part(("plan",), "any"),
        "token layout": SPREAD,
        "attention": UNTIMED,
        "exchange": ANY_EXCHANGE,
        "gate": Part(("gate",), f"a bias by what paths cost, {HOMES}"),
        "assignment": _none("experts are computed where the plan has them"),
        "movement": _none("no weights travel"),
        "balancer": _none("the plan stays as it is"),
        "schedule": Part(("schedule",), "any"),
    },
    "hd_moe": {
        "placement": Part(("plan",), "any sharded plan"),
        "token layout": SPREAD,
        "attention": UNTIMED,
        "exchange": ANY_EXCHANGE,
        "gate": Part(("gate",), f"a bias by what paths cost, {HOMES}"),
        "assignment": _none("experts are computed where the plan has them, and broadcast ones where tokens are"),
        "movement": Part(("broadcast", "experts", "window", "forecast", "rate", "prior"), "broadcasts before a layer"),
        "balancer": _none("a broadcast lasts for one layer, and the plan stays as it is"),
        "schedule": NO_MICRO_BATCHES,
    },
    "moentwine": {
        "placement": Part(("plan",), f"{WHOLE}; the layouts esp and baseline_esp slice experts themselves"),
        "token layout": Part(
            ("layout", "tp", "fetch", "all_gather", "both_ways", "closing"),
            "entwined rings and full domains on meshes and wafers, successive devices on switches and clusters",
        ),
        "attention": Part(("linear_speedup",), "tensor-parallel in the groups of the layout"),
        "exchange": _none("the token layout has its own; `system.fetch` says which member of a group sends"),
        "gate": Part(("gate",), "a bias by what paths cost, none where the layout slices experts"),
        "assignment": _none("all copies of an expert serve alike"),
        "movement": Part(("migration", "weights_from"), "weights of copies, on idle links or while inference waits"),
        "balancer": Part(("balancer", "alpha", "beta", "shadow_slots", "rate"), "none where the layout slices experts"),
        "schedule": Part(("schedule",), "any"),
    },
    "camoe": {
        "placement": Part(("plan",), WHOLE),
        "token layout": SPREAD,
        "attention": UNTIMED,
        "exchange": Part(("copies", "time_model"), "an all-to-all of vectors, with the counts of tokens before it"),
        "gate": Part(("bias", "lambda_cost", "own_node", "logits", "profile"), "a bias by what paths cost"),
        "assignment": _none("experts are computed where the plan has them"),
        "movement": _none("no weights travel"),
        "balancer": _none("the gate moves choices, and the plan stays as it is"),
        "schedule": NO_MICRO_BATCHES,
    },
    "wafer_gpu": {
        "placement": Part(("plan",), f"{WHOLE}, its home"),
        "token layout": _none("allocation says where requests are computed, and vectors are not counted"),
        "attention": UNTIMED,
        "exchange": _none("weights travel to requests; vectors are not counted, as in the paper"),
        "gate": _none("weights travel to tokens, and no token to its experts"),
        "assignment": Part(
            ("allocation", "block", "spare", "split", "bound", "host_link_GB_per_s", "host_fixed_us"),
            "of requests to dies, in every step",
        ),
        "movement": Part(
            (
                *("prediction", "top", "eviction", "unlimited", "popular_copies", "llc_prefetch"),
                *("slices", "request_bytes", "llc_hit_ns", "llc_miss_ns", "llc_write_ns"),
            ),
            "reads of remote experts, and copies of them in local HBM",
        ),
        "balancer": _none("allocation evens loads out in every step"),
        "schedule": NO_MICRO_BATCHES,
    },
    "expert_streaming": {
        "placement": _none("all dies load all experts, and none stays"),
        "token layout": SPREAD,
        "attention": Part(("attention",), "by heads over all dies, or left out"),
        "exchange": _none("tokens stay on their dies"),
        "gate": _none("every die loads a part of each expert, so that none is nearer"),
        "assignment": Part(("redistribute",), "where tokens are, or spread evenly"),
        "movement": Part(
            (
                *("strategy", "micro_slices", "loaded_by", "ahead", "buffer_MB", "control_ns", "scheduling_ns"),
                *("slack", "least_tokens", "spare_requests", "arrive_together", "prefetch"),
            ),
            "micro-slices from die to die; fse_buffered makes requests wait",
        ),
        "balancer": _none("no expert stays anywhere, so that there is nothing to place anew"),
        "schedule": _none("the order of micro-slices is its schedule"),
    },
}

OTHERS = tuple(name for name in COMPOSITION if name != "moentwine")  # place tokens on any network
MESHES, SWITCHED = ("mesh", "wafers"), ("switch", "clusters")  # networks of token layouts
WHOLE_EXPERTS = ("ep", "ep_balanced", "ep_random", "ep_runs")  # strategies that leave experts whole
DIVIDING = ("tp", "tp_both_ways", "hybrid", "hybrid_ring", "hybrid_complete")


def part_of(key: str) -> str:
    """The part that a key of `system` names in some system, or nothing."""
    return next((part for parts in COMPOSITION.values() for part in parts if key in parts[part].keys), "")


def foreign_key(system: str, key: str) -> str:
    """Why this system has no such key, where others have; nothing where none has it, or the system is not known."""
    part = part_of(key)
    if not part or system not in COMPOSITION:
        return ""
    own = COMPOSITION[system][part]
    instead = (
        f"Its {part} is named by {', '.join(own.paths)}" if own.keys else f"It has no {part} to name: {own.why_not}"
    )
    others = [name for name, parts in COMPOSITION.items() if key in parts[part].keys]
    return f"is a key of {', '.join(others)}, not of {system}. {instead}"


def check_together(system: Any, schedule: str, micro_batches: int, plan_divides: bool) -> None:
    """Whether the parts that a scenario names go together. `plan_divides`: its plan has parts of experts on nodes.

    Raises `RuleError`.
    """
    parts, name = COMPOSITION[system.name], system.name
    allowed = parts["schedule"]
    if schedule != "serial" and not allowed.keys:
        raise RuleError(("schedule",), schedule, f"serial with system {name}: {allowed.why_not}", "Leave the key out")
    if micro_batches > 1 and allowed is NO_MICRO_BATCHES:
        expected = f"a schedule without micro-batches with system {name}, which decides for whole batches"
        raise RuleError(("schedule",), schedule, expected, "Write serial, overlap or idle_links")
    sliced = str(getattr(system, "layout", "")).endswith("esp")
    if plan_divides and not sliced and parts["placement"].goes.startswith(WHOLE):
        remedy = f"Write one of {', '.join(WHOLE_EXPERTS)}, or the path of such a plan"
        raise RuleError(("system", "plan"), system.plan, f"{WHOLE}, with system {name}", remedy)
    if sliced and system.balancer != "none":
        expected = f"none, since layout {system.layout} slices experts over domains and leaves nothing to balance"
        raise RuleError(("system", "balancer"), system.balancer, expected, "Write balancer: none")


def check_machine(system: Any, kind: str) -> None:
    """Whether the token layout of a system goes with a kind of network. Raises `RuleError`."""
    if system.name != "moentwine" or kind in MESHES:
        return
    if kind not in SWITCHED:
        expected = f"a system for a {kind}: moentwine places tokens on {', '.join((*MESHES, *SWITCHED))}"
        raise RuleError(("system", "name"), system.name, expected, f"Write one of {', '.join(OTHERS)}")
    usual = type(system).model_fields["layout"].default  # what a new scenario states
    if system.layout != usual:
        expected = f"no layout on a {kind}, where groups are of successive devices"
        raise RuleError(("system", "layout"), system.layout, expected, "Leave the key out")


def table() -> str:
    """Systems by part, as Markdown: the key that chooses a part, or a dash where the system fixes it."""
    head = ["part", *(f"`{name}`" for name in COMPOSITION)]
    lines = [_row(head), _row(["---"] * len(head))]
    for part, about in PARTS.items():
        cells = [_chosen_by(parts[part]) for parts in COMPOSITION.values()]
        lines.append(_row([f"{part}: {about}", *cells]))
    return "\n".join(lines)


def _chosen_by(part: Part) -> str:
    return f"`{part.keys[0]}`" if part.keys else "-"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def details() -> str:
    """All keys of every part of every system and what goes with it, or why there is none, as Markdown."""
    return "\n\n".join("\n".join(_details_of(name)) for name in COMPOSITION)


def _details_of(name: str) -> Iterator[str]:
    yield f"### {name}\n"
    for part, own in COMPOSITION[name].items():
        keys = ", ".join(f"`{key}`" for key in own.paths)
        yield f"- {part}: {keys}: {own.goes}." if keys else f"- no {part} to name: {own.why_not}."


if __name__ == "__main__":
    print(f"{table()}\n\n{details()}")
