"""What a run is at: told where stages are timed, heard where progress is shown, which is loaded before JAX is."""

from collections.abc import Callable
from contextvars import ContextVar

on_stage: ContextVar[Callable[[str], None]] = ContextVar("on_stage", default=lambda _: None)
"""Called with the name of every stage as it begins."""
