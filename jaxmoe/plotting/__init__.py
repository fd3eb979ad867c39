"""Figures drawn from plain arrays, each written as one PNG. Nothing here computes a model."""

from jaxmoe.plotting.convergence import plot_convergence as plot_convergence
from jaxmoe.plotting.layers import plot_breakdown as plot_breakdown
from jaxmoe.plotting.layers import plot_layer_latency as plot_layer_latency
from jaxmoe.plotting.layers import plot_speedups as plot_speedups
from jaxmoe.plotting.mesh_loads import MeshPanel as MeshPanel
from jaxmoe.plotting.mesh_loads import plot_mesh_loads as plot_mesh_loads
from jaxmoe.plotting.network import plot_network as plot_network
from jaxmoe.plotting.scatter import plot_model_vs_simulation as plot_model_vs_simulation
from jaxmoe.plotting.timeline import GanttRow as GanttRow
from jaxmoe.plotting.timeline import plot_gantt as plot_gantt
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
from jaxmoe.plotting.traffic import plot_traffic as plot_traffic
