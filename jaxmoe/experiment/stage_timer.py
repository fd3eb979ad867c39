"""Wall time by stage, with the time JAX spends compiling kept apart; and reports of progress."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import jax.monitoring

from jaxmoe.progress import on_stage

Report = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the steps in all."""

COMPILING = "/jax/core/compile/"  # tracing, lowering and compiling all report under this name


class CompileTime:
    """Adds up when JAX was compiling. One function inside another, or beside it on a thread, is counted once."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._lock = Lock()

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        """Take note of something that has just ended."""
        if not event.startswith(COMPILING):
            return
        with self._lock:
            end = time.perf_counter()
            start = end - duration_secs
            # What is inside the new span ended before it, so it is at the end of the list.
            while self._spans and self._spans[-1][0] >= start:
                self._spans.pop()
            if self._spans:
                start = max(start, self._spans[-1][1])
            self._spans.append((start, end))

    @property
    def seconds(self) -> float:
        return sum((end - start for start, end in self._spans), start=0.0)


class StageTimer:
    """Seconds of every stage; entered, it listens to JAX. What numba compiles counts as running."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._compile = CompileTime()
        self._stages: dict[str, dict[str, float]] = {}

    def __enter__(self) -> "StageTimer":
        jax.monitoring.register_event_duration_secs_listener(self._compile.on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._compile.on_event)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs in here; a stage that runs again adds up."""
        on_stage.get()(name)
        start, compiled = time.perf_counter(), self._compile.seconds
        try:
            yield
        finally:
            compile_s = self._compile.seconds - compiled
            spent = self._stages.setdefault(name, {"run_s": 0.0, "compile_s": 0.0})
            spent["run_s"] += time.perf_counter() - start - compile_s
            spent["compile_s"] += compile_s

    def report(self) -> dict[str, object]:
        """Seconds since the timer was created, and running and compiling seconds of every stage."""
        return {"total": time.perf_counter() - self._start, "stages": self._stages}
