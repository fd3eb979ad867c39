"""Discrete-event simulation: replays what the analytic model predicts, and shares no formula with it."""

from jaxmoe.des.description import LayerDescription as LayerDescription
from jaxmoe.des.description import Memory as Memory
from jaxmoe.des.engine import Run as Run
from jaxmoe.des.engine import Services as Services
from jaxmoe.des.engine import simulate as simulate
from jaxmoe.des.fabric import Fabric as Fabric
from jaxmoe.des.fabric import fabric_of as fabric_of
from jaxmoe.des.layer import LayerReplay as LayerReplay
from jaxmoe.des.layer import RecordedLayer as RecordedLayer
from jaxmoe.des.layer import layer_seconds as layer_seconds
from jaxmoe.des.layer import record_layer as record_layer
from jaxmoe.des.layer import replay_layer as replay_layer
from jaxmoe.des.layer import replay_plan as replay_plan
from jaxmoe.des.movement import movement_seconds as movement_seconds
from jaxmoe.des.schedules import Send as Send
from jaxmoe.des.schedules import add_sends as add_sends
from jaxmoe.des.schedules import ring_sends as ring_sends
from jaxmoe.des.tasks import GraphBuilder as GraphBuilder
from jaxmoe.des.tasks import TaskGraph as TaskGraph
from jaxmoe.des.timeline import timeline_events as timeline_events
from jaxmoe.des.traffic import TrafficReplay as TrafficReplay
from jaxmoe.des.traffic import replay_traffic as replay_traffic
