"""wafer_gpu: tasks allocated by where data is, and copies of remote experts in local HBM."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxmoe.methods.settings.base import UNTIMED, WHOLE, SystemSettings
from jaxmoe.settings import setting

AllocationName = Literal["base", "home", "allo", "gradient", "linear_program"]

_assignment = partial(setting, part="assignment")
_movement = partial(setting, part="movement")


@dataclass(frozen=True)
class WaferGPUSettings(SystemSettings):
    """Task allocation and copies of remote experts on a wafer of GPU dies. The plan says where weights stay."""

    name = "wafer_gpu"
    made_by = "jaxmoe.methods.wafer_gpu.system:WaferGPU"
    plan = "ep_random"
    whole_experts = True
    takes_exchange = False
    keeps_requests = True
    goes = {  # noqa: RUF012
        "placement": f"{WHOLE}, its home",
        "assignment": "of requests to dies, in every step",
        "movement": "reads of remote experts, and copies of them in local HBM",
    }
    why_not = {  # noqa: RUF012
        "token layout": "allocation says where requests are computed, and vectors are not counted",
        "attention": UNTIMED,
        "exchange": "weights travel to requests; vectors are not counted, as in the paper",
        "gate": "weights travel to tokens, and no token to its experts",
        "balancer": "allocation evens loads out in every step",
    }

    allocation: AllocationName = _assignment(  # noqa: RUF009
        "allo",
        help="who computes which requests: round-robin, the homes of experts, Algorithm 1, a gradient descent "
        "through the model, or the assignment LP, rounded",
        example="gradient",
    )
    block: int = _assignment(50, help="the number of requests that are allocated at once", at_least=1, example=50)
    spare: int = _assignment(
        4, help="the number of candidate dies beyond one for each block of an expert", at_least=0, example=4
    )
    split: int | None = _assignment(
        None,
        help="the number of dies that round-robin divides every expert over",
        null="for blocks of requests",
        at_least=1,
        example=3,
    )
    bound: bool = _assignment(False, help="whether the assignment bound of every layer is found too", example=True)
    host_link_GB_per_s: float | None = _assignment(  # noqa: N815
        None,
        help="the bandwidth of PCIe to a host that allocates",
        unit="GB/s",
        null="where the wafer does",
        above=0,
        example=64,
    )
    host_fixed_us: float = _assignment(
        0.0, help="what the way to the host and back takes for each layer", unit="us", at_least=0, example=15
    )
    prediction: Literal["none", "heatmap", "perfect"] = _movement(
        "heatmap",
        help="what says which remote experts are copied into local HBM: nothing, the cross-token heat map, or "
        "the next step itself",
        example="none",
    )
    top: int = _movement(32, help="the number of experts that each row of the heat map predicts", at_least=1)
    eviction: Literal["least_popular", "least_recent", "keep"] = _movement(
        "least_popular", help="which copy goes when a die is full", example="least_recent"
    )
    unlimited: bool = _movement(False, help="whether copies take no room", example=True)
    popular_copies: int = _movement(
        0,
        help="the number of experts of a layer, the most popular so far, that every die has a copy of from the "
        "start, as far as they fit",
        at_least=0,
        example=2,
    )
    llc_prefetch: bool = _movement(
        False,
        help="whether dies read into their LLC, while HBM is idle, what the layer before lets expect",
        example=True,
    )
    outstanding: int | None = _movement(
        None,
        help="the number of slices that a die reads at once; it asks for another when one is there",
        null="for as many as it likes, in a stream",
        at_least=1,
        example=1,
    )
    switching: Literal["cut_through", "store_and_forward"] = _movement(
        "cut_through",
        help="how links pass slices on: as they come, or each when it is there whole",
        example="store_and_forward",
    )
    slices: int = _movement(2, help="the number of slices that an expert is read in", at_least=1, example=2)
    request_bytes: float = _movement(
        16.0, help="the size of command and address of a remote request", unit="B", at_least=0, example=16
    )
    llc_hit_ns: float = _movement(100.0, help="what a hit in the LLC takes", unit="ns", at_least=0, example=100)
    llc_miss_ns: float = _movement(110.0, help="what a miss in the LLC adds", unit="ns", at_least=0, example=110)
    llc_write_ns: float = _movement(30.0, help="what a write into the LLC takes", unit="ns", at_least=0, example=30)
