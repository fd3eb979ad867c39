"""Time of a MoE layer, and what limits it."""

from jaxmoe.latency.layer import LayerLatency as LayerLatency
from jaxmoe.latency.layer import LayerModel as LayerModel
