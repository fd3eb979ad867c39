"""A differentiable, vectorised performance model of Mixture-of-Experts inference on meshes of chips."""

from jaxmoe.hardware import Die as Die
from jaxmoe.hardware import Machine as Machine
from jaxmoe.hardware import Mesh as Mesh
from jaxmoe.latency import LayerCosts as LayerCosts
from jaxmoe.latency import LayerModel as LayerModel
from jaxmoe.latency import LayerTime as LayerTime
from jaxmoe.latency import evaluate as evaluate
from jaxmoe.models import MoEModel as MoEModel
from jaxmoe.placement import Placement as Placement
from jaxmoe.traces import Batch as Batch
from jaxmoe.traces import GatingTrace as GatingTrace
from jaxmoe.traces import sample_batches as sample_batches
from jaxmoe.tune import PlacementProblem as PlacementProblem
from jaxmoe.tune import TunerSettings as TunerSettings
from jaxmoe.tune import tune as tune

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Die",
    "GatingTrace",
    "LayerCosts",
    "LayerModel",
    "LayerTime",
    "Machine",
    "Mesh",
    "MoEModel",
    "Placement",
    "PlacementProblem",
    "TunerSettings",
    "evaluate",
    "sample_batches",
    "tune",
]
