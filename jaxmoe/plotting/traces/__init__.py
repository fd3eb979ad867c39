"""Pictures of gating traces: relations between choices, loads, predictions, and made-up traces beside real ones."""

from jaxmoe.plotting.traces.by_layer import plot_reuse as plot_reuse
from jaxmoe.plotting.traces.by_layer import plot_stage_correlation as plot_stage_correlation
from jaxmoe.plotting.traces.comparison import plot_trace_comparison as plot_trace_comparison
from jaxmoe.plotting.traces.coverage import plot_coverage as plot_coverage
from jaxmoe.plotting.traces.heatmaps import plot_coactivation as plot_coactivation
from jaxmoe.plotting.traces.heatmaps import plot_conditional as plot_conditional
from jaxmoe.plotting.traces.loads import plot_expert_load as plot_expert_load
from jaxmoe.plotting.traces.loads import plot_long_tail as plot_long_tail
from jaxmoe.plotting.traces.over_time import plot_node_load as plot_node_load
from jaxmoe.plotting.traces.recall import plot_recall as plot_recall
from jaxmoe.plotting.traces.topics import plot_top_experts as plot_top_experts
