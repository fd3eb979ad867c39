"""Gating traces: read, drawn from, made up."""

from jaxmoe.traces.batches import Batch as Batch
from jaxmoe.traces.batches import sample_batches as sample_batches
from jaxmoe.traces.trace import GatingTrace as GatingTrace
from jaxmoe.traces.trace import TraceError as TraceError
