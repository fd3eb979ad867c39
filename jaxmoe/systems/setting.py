"""What systems have in common: settings of their own, and a method made for a plan on a machine."""

import abc
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxmoe.errors import InputError
from jaxmoe.latency import LayerModel
from jaxmoe.models import MoEModel
from jaxmoe.placement.placement import Mode
from jaxmoe.policies import AbstractMethod
from jaxmoe.traces import GatingTrace


@dataclass(frozen=True)
class Setting:
    """What a system is made for: a plan, its model and machine, and the gating that was seen before the run."""

    share: Float[np.ndarray, "layer expert node"]
    mode: Mode
    model: LayerModel
    moe: MoEModel
    weight_bytes_per_element: float
    history: GatingTrace  # the layers of the plan


class UnsuitableSystemError(InputError):
    """A system that is not known, or does not suit its setting. The message has the reason and the remedy."""


class AbstractSystem(abc.ABC):
    """A paper's method as a composition of parts, with its settings."""

    @abc.abstractmethod
    def method(self, setting: Setting) -> AbstractMethod:
        """The method to roll out. Raises `UnsuitableSystemError` where it does not suit the setting."""
