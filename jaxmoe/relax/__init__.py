"""Smooth stand-ins for hard operations. Knows nothing of networks or experts."""

from jaxmoe.relax.smooth import AbstractReduction as AbstractReduction
from jaxmoe.relax.smooth import AbstractSupport as AbstractSupport
from jaxmoe.relax.smooth import HardMax as HardMax
from jaxmoe.relax.smooth import HardSupport as HardSupport
from jaxmoe.relax.smooth import SmoothMax as SmoothMax
from jaxmoe.relax.smooth import SoftSupport as SoftSupport
from jaxmoe.relax.smooth import as_number as as_number
from jaxmoe.relax.smooth import geometric as geometric
from jaxmoe.relax.smooth import sinkhorn as sinkhorn
