"""Runtime policies: what is decided anew in every iteration, as init/step pairs on pytrees."""

from jaxmoe.policies.dispatch import serve as serve
from jaxmoe.policies.forecast import AbstractForecast as AbstractForecast
from jaxmoe.policies.forecast import CrossLayer as CrossLayer
from jaxmoe.policies.forecast import MovingAverage as MovingAverage
from jaxmoe.policies.forecast import PerfectForecast as PerfectForecast
from jaxmoe.policies.forecast import StaticForecast as StaticForecast
from jaxmoe.policies.policy import AbstractPolicy as AbstractPolicy
from jaxmoe.policies.policy import Decision as Decision
from jaxmoe.policies.policy import replay as replay
from jaxmoe.policies.prebroadcast import PreBroadcast as PreBroadcast
from jaxmoe.policies.priority import choose_experts as choose_experts
from jaxmoe.policies.window import experts_in_window as experts_in_window
