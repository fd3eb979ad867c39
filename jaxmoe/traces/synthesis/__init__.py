"""Generators of gating traces: fitted to a recorded trace, or set up from published figures of a model."""

from jaxmoe.traces.synthesis.files import read_process as read_process
from jaxmoe.traces.synthesis.files import write_process as write_process
from jaxmoe.traces.synthesis.fitting import fit_process as fit_process
from jaxmoe.traces.synthesis.fitting import fitted_part as fitted_part
from jaxmoe.traces.synthesis.presets import PRESETS as PRESETS
from jaxmoe.traces.synthesis.presets import preset_process as preset_process
from jaxmoe.traces.synthesis.process import GatingProcess as GatingProcess
from jaxmoe.traces.synthesis.process import Preferences as Preferences
from jaxmoe.traces.synthesis.requests import Requests as Requests
from jaxmoe.traces.synthesis.sampling import sample_parts as sample_parts
from jaxmoe.traces.synthesis.sampling import sample_trace as sample_trace
from jaxmoe.traces.synthesis.zipf import zipf_trace as zipf_trace
