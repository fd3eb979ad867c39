"""expert_streaming: experts that stream through dies in micro-slices."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxmoe.methods.settings.base import SPREAD, SystemSettings
from jaxmoe.settings import setting

_movement = partial(setting, part="movement")


@dataclass(frozen=True)
class ExpertStreamingSettings(SystemSettings):
    """Experts that stream through dies in micro-slices (expert_streaming_fse_dp). It takes no plan."""

    name = "expert_streaming"
    made_by = "jaxmoe.methods.expert_streaming.system:ExpertStreaming"
    plan = None
    takes_exchange = False
    goes = {  # noqa: RUF012
        "attention": "by heads over all dies, or left out",
        "assignment": "where tokens are, or spread evenly",
        "movement": "micro-slices from die to die; fse_buffered makes requests wait",
    }
    why_not = {  # noqa: RUF012
        "placement": "all dies load all experts, and none stays",
        "token layout": SPREAD,
        "exchange": "tokens stay on their dies",
        "gate": "every die loads a part of each expert, so that none is nearer",
        "balancer": "no expert stays anywhere, so that there is nothing to place anew",
    }

    strategy: Literal["fse_naive", "fse", "fse_paired", "fse_rule5", "fse_buffered"] = _movement(
        "fse_paired", help="what streams how, A1 to A5 of VI-C", example="fse"
    )
    micro_slices: int = _movement(
        8, help="the number of parts that the slice of every die is cut into", at_least=1, example=8
    )
    loaded_by: Literal["all", "trajectory"] = _movement(
        "all",
        help="whether all dies load a part of every expert, or those alone that hold its tokens",
        example="trajectory",
    )
    ahead: bool = _movement(
        True,
        help="whether micro-slices of the next experts are loaded as soon as there is room (rule 4), or not "
        "before those of the experts before are computed",
        example=False,
    )
    buffer_MB: float | None = _movement(  # noqa: N815
        None,
        help="the buffer of a die for micro-slices",
        unit="MB",
        null="for the capacity of the nearest memory level",
        above=0,
        example=8,
    )
    control_ns: float = _movement(
        200.0,
        help="what setting up each load, transfer and computation of a micro-slice takes",
        unit="ns",
        at_least=0,
        example=200,
    )
    scheduling_ns: float = _movement(
        500.0, help="what the scheduler takes before the first expert", unit="ns", at_least=0, example=500
    )
    slack: float = _movement(
        0.2,
        help="the part of its forward passes that a request may wait, of fse_buffered, 0 to 1",
        at_least=0,
        at_most=1,
        example=0.1,
    )
    least_tokens: float = _movement(
        2.0,
        help="the tokens below which an expert makes requests wait, theta_min of fse_buffered",
        at_least=0,
        example=2,
    )
    spare_requests: float = _movement(
        1.0,
        help="requests that take the places of those that wait, as a part of the batch; 0 leaves places empty",
        at_least=0,
        example=0,
    )
    arrive_together: bool = _movement(
        False, help="whether all requests begin in one iteration, and so may wait in the same ones"
    )
    prefetch: Literal["none", "moving_average", "static", "perfect", "cross_layer"] = _movement(
        "none",
        help="what the order is forecast from in which experts are loaded before the gate decides, while "
        "attention leaves DDR idle",
        example="cross_layer",
    )
    redistribute: bool = setting(
        False, help="whether the tokens of an expert are spread evenly over the dies first", part="assignment"
    )
    attention: bool = setting(True, help="whether attention by heads comes before the experts", part="attention")
