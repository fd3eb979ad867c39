"""Gating traces: read, written, drawn from, made up."""

from jaxmoe.traces.batches import Batch as Batch
from jaxmoe.traces.batches import expert_counts as expert_counts
from jaxmoe.traces.batches import merge_tokens as merge_tokens
from jaxmoe.traces.batches import over_batches as over_batches
from jaxmoe.traces.batches import sample_batches as sample_batches
from jaxmoe.traces.batches import successive_batches as successive_batches
from jaxmoe.traces.files import Recording as Recording
from jaxmoe.traces.files import read_any as read_any
from jaxmoe.traces.files import read_loads as read_loads
from jaxmoe.traces.files import read_trace as read_trace
from jaxmoe.traces.files import write_as as write_as
from jaxmoe.traces.files import write_trace as write_trace
from jaxmoe.traces.formats.hints import Hints as Hints
from jaxmoe.traces.formats.npz import write_trace_in_parts as write_trace_in_parts
from jaxmoe.traces.loads import LoadCounts as LoadCounts
from jaxmoe.traces.loads import load_counts as load_counts
from jaxmoe.traces.synthetic import synthetic_trace as synthetic_trace
from jaxmoe.traces.trace import DECODE as DECODE
from jaxmoe.traces.trace import MISSING as MISSING
from jaxmoe.traces.trace import PREFILL as PREFILL
from jaxmoe.traces.trace import GatingTrace as GatingTrace
from jaxmoe.traces.trace import TraceError as TraceError
