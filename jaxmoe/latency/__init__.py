"""Time of a MoE layer, and what limits it."""

from jaxmoe.latency.evaluation import Judgement as Judgement
from jaxmoe.latency.evaluation import is_tensor_parallel as is_tensor_parallel
from jaxmoe.latency.evaluation import judge as judge
from jaxmoe.latency.layer import LayerLatency as LayerLatency
from jaxmoe.latency.layer import LayerModel as LayerModel
from jaxmoe.latency.whole import BesideExperts as BesideExperts
from jaxmoe.latency.whole import EvenPart as EvenPart
from jaxmoe.latency.whole import EvenParts as EvenParts
