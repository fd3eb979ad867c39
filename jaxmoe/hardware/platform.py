"""The machine: a mesh of links between dies."""

import equinox as eqx

from jaxmoe.hardware.die import Die
from jaxmoe.hardware.mesh import Mesh


class Platform(eqx.Module):
    """A mesh and the dies at its nodes."""

    mesh: Mesh
    die: Die
