"""Compute and memory time of operators on a node."""

from jaxmoe.roofline.expert import expert_node_times as expert_node_times
