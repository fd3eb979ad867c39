"""Where the experts live: shares, strategies that make them, rounding to legal plans, and plan files."""

from jaxmoe.placement.files import read_plan as read_plan
from jaxmoe.placement.files import write_plan as write_plan
from jaxmoe.placement.placement import Placement as Placement
from jaxmoe.placement.placement import PlanError as PlanError
from jaxmoe.placement.placement import check_fits as check_fits
