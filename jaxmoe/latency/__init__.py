"""Time of a MoE layer, and what limits it."""

from jaxmoe.latency.compute import expert_seconds as expert_seconds
from jaxmoe.latency.demand import Decisions as Decisions
from jaxmoe.latency.demand import LayerCosts as LayerCosts
from jaxmoe.latency.demand import Movement as Movement
from jaxmoe.latency.demand import lower as lower
from jaxmoe.latency.evaluation import evaluate as evaluate
from jaxmoe.latency.evaluation import is_tensor_parallel as is_tensor_parallel
from jaxmoe.latency.layer import LayerModel as LayerModel
from jaxmoe.latency.schedule import AbstractSchedule as AbstractSchedule
from jaxmoe.latency.schedule import IdleLinks as IdleLinks
from jaxmoe.latency.schedule import Overlap as Overlap
from jaxmoe.latency.schedule import Pipelined as Pipelined
from jaxmoe.latency.schedule import ScheduleError as ScheduleError
from jaxmoe.latency.schedule import Serial as Serial
from jaxmoe.latency.schedule import schedule_of as schedule_of
from jaxmoe.latency.time import LayerTime as LayerTime
from jaxmoe.latency.whole import BesideExperts as BesideExperts
from jaxmoe.latency.whole import EvenPart as EvenPart
from jaxmoe.latency.whole import EvenParts as EvenParts
