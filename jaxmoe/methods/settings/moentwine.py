"""moentwine: token layouts, attention in groups, and balancers."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxmoe.errors import RuleError
from jaxmoe.methods.settings.base import BIAS, WHOLE, SystemSettings
from jaxmoe.settings import setting

_layout = partial(setting, part="token layout")
_balancer = partial(setting, part="balancer")
_movement = partial(setting, part="movement")

USUAL_LAYOUT = "er"
SLICED = ("esp", "baseline_esp")  # layouts that slice experts over domains themselves


@dataclass(frozen=True)
class MoentwineSettings(SystemSettings):
    """Token layouts and balancers of moentwine. The plan has to be of whole experts, unless a layout slices them."""

    name = "moentwine"
    made_by = "jaxmoe.methods.moentwine.system:Moentwine"
    plan = "ep"
    whole_experts = True
    takes_exchange = False
    takes_gate = True
    schedules = "any"
    networks = "places tokens on mesh, wafers, switch, clusters"
    goes = {  # noqa: RUF012
        "placement": f"{WHOLE}; the layouts esp and baseline_esp slice experts themselves",
        "token layout": (
            "entwined rings and full domains on meshes and wafers, successive devices on switches and clusters"
        ),
        "attention": "tensor-parallel in the groups of the layout",
        "gate": f"{BIAS}, none where the layout slices experts",
        "movement": "weights of copies, on idle links or while inference waits",
        "balancer": "none where the layout slices experts",
    }
    why_not = {  # noqa: RUF012
        "exchange": "the token layout has its own; `system.fetch` says which member of a group sends",
        "assignment": "all copies of an expert serve alike",
    }

    layout: Literal["baseline", "er", "her", "esp", "baseline_esp"] = _layout(
        USUAL_LAYOUT,
        help="where tokens live: in blocks (baseline), entwined rings (er), rings of each wafer (her), or with "
        "experts in slices over domains (esp, baseline_esp)",
        example="her",
    )
    tp: int = _layout(4, help="the number of devices that share the attention of a token", at_least=1, example=4)
    fetch: Literal["domain", "nearest"] = _layout(
        "domain", help="from which member of a group a device fetches its tokens", example="nearest"
    )
    all_gather: bool | None = _layout(
        None,
        help="whether all members of a group get its tokens after attention",
        null="for the layout's own way",
        example=False,
    )
    both_ways: bool = _layout(True, help="whether rings go both ways round", example=False)
    closing: bool = _layout(False, help="whether the sums of a token's holders are reduced at the end of a layer")
    linear_speedup: float = setting(
        2.0,
        help="how many times as fast as the die's rate linear layers of attention are, 2 for INT8 beside FP16",
        above=0,
        example=1,
        part="attention",
    )
    balancer: Literal["none", "eplb", "greedy", "topology_aware", "gradient"] = _balancer(
        "topology_aware", help="what places copies of experts anew", example="eplb"
    )
    migration: Literal["invasive", "non_invasive"] = _movement(
        "non_invasive",
        help="whether inference waits for weights that move, or they take what links leave idle",
        example="invasive",
    )
    alpha: float = _balancer(
        0.0,
        help="the expected (max - mean) / mean of loads, summed over layers, above which the balancer acts",
        at_least=0,
        example=20,
    )
    beta: float = _balancer(0.0, help="the iterations that it waits after it last acted", at_least=0, example=10)
    shadow_slots: int = _balancer(1, help="the number of slots for copies on every node", at_least=1, example=1)
    rate: float = _balancer(
        0.1, help="the weight of the latest iteration in the forecast of loads", at_least=0, at_most=1, example=0.1
    )
    weights_from: Literal["copy", "edge"] = _movement(
        "copy", help="whether weights come from the nearest copy, or from disks at the wafer's edge", example="edge"
    )

    @property
    def slices_experts(self) -> bool:
        """Whether the layout slices experts over domains itself."""
        return self.layout in SLICED

    @property
    def needs_whole_experts(self) -> bool:
        return not self.slices_experts

    def check(self) -> None:
        if self.slices_experts and self.balancer != "none":
            expected = f"none, since layout {self.layout} slices experts over domains and leaves nothing to balance"
            raise RuleError(("balancer",), self.balancer, expected, "Write balancer: none")

    @classmethod
    def suits_network(cls, is_mesh: bool, has_switches: bool) -> bool:
        return is_mesh or has_switches

    def check_network(self, kind: str, is_mesh: bool) -> None:
        if not is_mesh and self.layout != USUAL_LAYOUT:  # a new scenario states the usual one
            expected = f"no layout on a {kind}, where groups are of successive devices"
            raise RuleError(("layout",), self.layout, expected, "Leave the key out")
