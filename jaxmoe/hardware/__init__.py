"""Descriptions of machines: dies, networks of links, memory levels, and the machine that joins them."""

from jaxmoe.hardware.bisection import bisection_bandwidth as bisection_bandwidth
from jaxmoe.hardware.die import Die as Die
from jaxmoe.hardware.graph import Graph as Graph
from jaxmoe.hardware.graph import TopologyError as TopologyError
from jaxmoe.hardware.graph import build_graph as build_graph
from jaxmoe.hardware.machine import Machine as Machine
from jaxmoe.hardware.memory import MemoryLevel as MemoryLevel
from jaxmoe.hardware.memory import node_memory as node_memory
from jaxmoe.hardware.mesh import Mesh as Mesh
from jaxmoe.hardware.networks import clusters as clusters
from jaxmoe.hardware.networks import fully_connected as fully_connected
from jaxmoe.hardware.networks import ring as ring
from jaxmoe.hardware.networks import switch as switch
from jaxmoe.hardware.networks import torus as torus
from jaxmoe.hardware.networks import wafers as wafers
from jaxmoe.hardware.topology import AbstractTopology as AbstractTopology
