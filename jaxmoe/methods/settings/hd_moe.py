"""hd_moe: broadcasts of experts before a layer."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxmoe.methods.settings.base import AS_PLACED, HOMES, SPREAD, UNTIMED, SystemSettings
from jaxmoe.settings import setting

_movement = partial(setting, part="movement")


@dataclass(frozen=True)
class HDMoESettings(SystemSettings):
    """Pre-broadcast of hd_moe IV-D on top of the plan."""

    name = "hd_moe"
    made_by = "jaxmoe.methods.hd_moe:HDMoE"
    takes_gate = True
    goes = {"placement": "any sharded plan", "gate": HOMES, "movement": "broadcasts before a layer"}  # noqa: RUF012
    why_not = {  # noqa: RUF012
        "token layout": SPREAD,
        "attention": f"{UNTIMED}; attention is counted in the windows last_layer and idle_links",
        "assignment": f"{AS_PLACED}, and broadcast ones where tokens are",
        "balancer": "a broadcast lasts for one layer, and the plan stays as it is",
    }

    broadcast: Literal["hidden", "charged"] = _movement(
        "hidden",
        help="whether the broadcast has the links to itself during the layer before, or the schedule charges it",
        example="charged",
    )
    experts: int = _movement(
        2, help="the number of experts of a layer that are broadcast, with window: last the most", at_least=1, example=2
    )
    window: Literal["fixed", "last", "last_layer", "idle_links"] = _movement(
        "fixed",
        help="whether as many are broadcast as `experts` says, or as fit the time of the experts before, or of the "
        "whole layer before with its attention, or what that leaves idle of the busiest link",
        example="last",
    )
    forecast: Literal["moving_average", "static", "perfect", "cross_layer"] = _movement(
        "moving_average", help="what expert loads are forecast from", example="moving_average"
    )
    rate: float = _movement(
        0.5, help="the weight of the latest iteration in the moving average", at_least=0, at_most=1, example=0.5
    )
    prior: float = _movement(
        10.0,
        help="the number of choices by the frequencies that every row of cross_layer starts with",
        above=0,
        example=10,
    )
