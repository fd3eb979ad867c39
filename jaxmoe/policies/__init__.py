"""Methods: what is decided anew in every step, as init/step pairs on pytrees, and their rollout over steps."""

from jaxmoe.policies.balancing import Balancer as Balancer
from jaxmoe.policies.balancing import BalancerError as BalancerError
from jaxmoe.policies.balancing import Eplb as Eplb
from jaxmoe.policies.balancing import KeepSlots as KeepSlots
from jaxmoe.policies.balancing import ShadowSlots as ShadowSlots
from jaxmoe.policies.balancing import balanced_rollout as balanced_rollout
from jaxmoe.policies.balancing import first_slots as first_slots
from jaxmoe.policies.forecast import AbstractForecast as AbstractForecast
from jaxmoe.policies.forecast import CrossLayer as CrossLayer
from jaxmoe.policies.forecast import MovingAverage as MovingAverage
from jaxmoe.policies.forecast import PerfectForecast as PerfectForecast
from jaxmoe.policies.forecast import StaticForecast as StaticForecast
from jaxmoe.policies.method import AbstractMethod as AbstractMethod
from jaxmoe.policies.method import LayerExchanges as LayerExchanges
from jaxmoe.policies.method import StaticPlan as StaticPlan
from jaxmoe.policies.method import rollout as rollout
from jaxmoe.policies.migration import Windows as Windows
from jaxmoe.policies.prebroadcast import AbstractAllowance as AbstractAllowance
from jaxmoe.policies.prebroadcast import FixedAllowance as FixedAllowance
from jaxmoe.policies.prebroadcast import PreBroadcast as PreBroadcast
from jaxmoe.policies.prebroadcast import WindowAllowance as WindowAllowance
from jaxmoe.policies.prebroadcast import broadcast_experts as broadcast_experts
from jaxmoe.policies.prebroadcast import choose_experts as choose_experts
from jaxmoe.policies.prebroadcast import experts_in_window as experts_in_window
from jaxmoe.policies.prebroadcast import serve as serve
