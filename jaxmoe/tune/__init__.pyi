from .problem import PlacementProblem as PlacementProblem
from .result import History as History
from .result import TuneResult as TuneResult
from .settings import TunerSettings as TunerSettings
from .tuner import tune as tune
