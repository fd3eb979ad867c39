"""Descriptions of machines: dies, meshes of links, and the platform that joins them."""

from jaxmoe.hardware.die import Die as Die
from jaxmoe.hardware.mesh import Mesh as Mesh
from jaxmoe.hardware.platform import Platform as Platform
