from .hardware import Die as Die
from .hardware import Machine as Machine
from .hardware import Mesh as Mesh
from .latency import LayerCosts as LayerCosts
from .latency import LayerModel as LayerModel
from .latency import LayerTime as LayerTime
from .latency import evaluate as evaluate
from .models import MoEModel as MoEModel
from .placement import Placement as Placement
from .traces import Batch as Batch
from .traces import GatingTrace as GatingTrace
from .traces import sample_batches as sample_batches
from .tune import PlacementProblem as PlacementProblem
from .tune import TunerSettings as TunerSettings

__version__: str
