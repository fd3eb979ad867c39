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
from jaxmoe.plotting.traffic import plot_traffic as plot_traffic
