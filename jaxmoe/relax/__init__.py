"""Smooth stand-ins for hard operations. Knows nothing of networks or experts."""

from jaxmoe.relax.number import as_number as as_number
from jaxmoe.relax.reduction import AbstractReduction as AbstractReduction
from jaxmoe.relax.reduction import HardMax as HardMax
from jaxmoe.relax.reduction import SmoothMax as SmoothMax
from jaxmoe.relax.schedule import geometric as geometric
from jaxmoe.relax.sinkhorn import sinkhorn as sinkhorn
from jaxmoe.relax.support import AbstractSupport as AbstractSupport
from jaxmoe.relax.support import HardSupport as HardSupport
from jaxmoe.relax.support import SoftSupport as SoftSupport
