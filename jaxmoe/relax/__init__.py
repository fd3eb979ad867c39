"""Smooth stand-ins for hard operations. Knows nothing of networks or experts."""

from jaxmoe.relax.reduction import AbstractReduction as AbstractReduction
from jaxmoe.relax.reduction import AbstractSupport as AbstractSupport
from jaxmoe.relax.reduction import HardMax as HardMax
from jaxmoe.relax.reduction import HardSupport as HardSupport
from jaxmoe.relax.reduction import SmoothMax as SmoothMax
from jaxmoe.relax.reduction import SoftSupport as SoftSupport
from jaxmoe.relax.reduction import as_number as as_number
from jaxmoe.relax.transport import geometric as geometric
from jaxmoe.relax.transport import sinkhorn as sinkhorn
