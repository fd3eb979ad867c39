"""camoe: a gate that knows what paths cost, as a system of its own and before others."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxmoe.methods.settings.base import AS_PLACED, BIAS, SPREAD, UNTIMED, WHOLE, SystemSettings
from jaxmoe.settings import setting

_gate = partial(setting, part="gate")
_exchange = partial(setting, part="exchange")

_cost = partial(
    setting, 0.2, help="how strongly costs bias the gate, 0 for not at all", at_least=0, example=0.2, part="gate"
)
_logits = partial(
    setting,
    "recorded",
    help="whether the trace has logits, or they are reconstructed from gate weights",
    example="reconstructed",
    part="gate",
)


@dataclass(frozen=True)
class CostGateSettings:
    """The cost-aware gate of camoe in front of another system: what a token's paths cost biases its choices."""

    lambda_cost: float = _cost()
    logits: Literal["recorded", "reconstructed"] = _logits()


@dataclass(frozen=True)
class CAMoESettings(SystemSettings):
    """The cost-aware gate of camoe on a plan of whole experts."""

    name = "camoe"
    made_by = "jaxmoe.methods.camoe.system:CAMoE"
    whole_experts = True
    takes_exchange = False
    goes = {  # noqa: RUF012
        "placement": WHOLE,
        "exchange": "an all-to-all of vectors, with the counts of tokens before it",
        "gate": BIAS,
    }
    why_not = {  # noqa: RUF012
        "token layout": SPREAD,
        "attention": UNTIMED,
        "assignment": AS_PLACED,
        "movement": "no weights travel",
        "balancer": "the gate moves choices, and the plan stays as it is",
    }

    bias: Literal["rule", "gradient"] = _gate(
        "rule",
        help="whether the bias is the paper's, or by gradient descent with as much gate mass lost",
        example="gradient",
    )
    lambda_cost: float = _cost()
    own_node: Literal["counted", "left_out"] = _gate(
        "counted",
        help="whether a node's own experts, which cost nothing, are in the scores of costs, as in the paper",
        example="left_out",
    )
    capacity_factor: float | None = _gate(
        None,
        help="how many times the mean of a batch an expert takes at most; tokens choose in turn among those with room",
        null="for any number",
        at_least=1,
        example=4.0,
    )
    copies: Literal["assignment", "node"] = _exchange(
        "assignment",
        help="whether a vector is sent for every expert that a token chose, or once to every node",
        example="node",
    )
    time_model: Literal["alpha_beta", "congestion"] = _exchange(
        "alpha_beta",
        help="whether every pair of nodes is priced by itself, or links that they share",
        example="congestion",
    )
    logits: Literal["recorded", "reconstructed"] = _logits()
    profile: str | None = _gate(
        None,
        help="the path of a profile.csv of jaxmoe network profile that the bias is made of",
        null="for the machine's own numbers",
        example="fitted/profile.csv",
    )
