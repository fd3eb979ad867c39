from .problem import History as History
from .problem import PlacementProblem as PlacementProblem
from .problem import TuneResult as TuneResult
from .settings import TunerSettings as TunerSettings
from .tuner import tune as tune
