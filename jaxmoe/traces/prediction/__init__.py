"""Prediction of the experts that tokens will choose, from history alone.

`fit(trace)` gives every predictor by name; `scores(predictor, history(trace, ...))` those of a whole trace.
"""

from jaxmoe.traces.prediction.fitting import fit as fit
from jaxmoe.traces.prediction.fitting import split_sequences as split_sequences
from jaxmoe.traces.prediction.frequency import Frequency as Frequency
from jaxmoe.traces.prediction.frequency import MovingAverage as MovingAverage
from jaxmoe.traces.prediction.frequency import RunningWindow as RunningWindow
from jaxmoe.traces.prediction.heatmaps import AbstractHeatmap as AbstractHeatmap
from jaxmoe.traces.prediction.heatmaps import NextLayer as NextLayer
from jaxmoe.traces.prediction.heatmaps import NextToken as NextToken
from jaxmoe.traces.prediction.heatmaps import conditional_rows as conditional_rows
from jaxmoe.traces.prediction.heatmaps import top_of_rows as top_of_rows
from jaxmoe.traces.prediction.limits import Perfect as Perfect
from jaxmoe.traces.prediction.limits import Random as Random
from jaxmoe.traces.prediction.predictor import AbstractPredictor as AbstractPredictor
from jaxmoe.traces.prediction.predictor import History as History
from jaxmoe.traces.prediction.predictor import advance as advance
from jaxmoe.traces.prediction.predictor import history as history
from jaxmoe.traces.prediction.predictor import replay as replay
from jaxmoe.traces.prediction.predictor import scores as scores
from jaxmoe.traces.prediction.prefill import PrefillHeatmap as PrefillHeatmap
from jaxmoe.traces.prediction.prefill import PrefillLoad as PrefillLoad
from jaxmoe.traces.prediction.scoring import batch_loads as batch_loads
from jaxmoe.traces.prediction.scoring import load_error as load_error
from jaxmoe.traces.prediction.scoring import ranks as ranks
from jaxmoe.traces.prediction.scoring import recall as recall
from jaxmoe.traces.prediction.scoring import set_recall as set_recall
from jaxmoe.traces.prediction.scoring import window_loads as window_loads
