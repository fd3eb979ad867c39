"""The machine: dies and the network between them."""

import equinox as eqx

from jaxmoe.hardware.die import Die
from jaxmoe.hardware.topology import AbstractTopology


class Platform(eqx.Module):
    """A network and the dies at its nodes."""

    topology: AbstractTopology
    die: Die
