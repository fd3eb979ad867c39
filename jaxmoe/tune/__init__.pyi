from .problem import PlacementProblem as PlacementProblem
from .results import History as History
from .results import TuneResult as TuneResult
from .settings import TunerSettings as TunerSettings
from .tuner import tune as tune
