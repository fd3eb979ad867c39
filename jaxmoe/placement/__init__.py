"""Where the experts live: shares, strategies that make them, rounding to legal plans, and plan files."""

from jaxmoe.placement.files import read_plan as read_plan
from jaxmoe.placement.files import write_plan as write_plan
from jaxmoe.placement.placement import Placement as Placement
from jaxmoe.placement.placement import PlanError as PlanError
from jaxmoe.placement.placement import check_fits as check_fits
from jaxmoe.placement.strategies import expert_parallel_balanced as expert_parallel_balanced
from jaxmoe.placement.strategies import expert_parallel_random as expert_parallel_random
from jaxmoe.placement.strategies import hybrid as hybrid
from jaxmoe.placement.strategies import tensor_parallel as tensor_parallel
