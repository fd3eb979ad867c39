from .points import Point as Point
from .points import Space as Space
from .points import SweepError as SweepError
from .run import Sweep as Sweep
from .run import run_sweep as run_sweep
from .study import Study as Study
from .study import read_study as read_study
