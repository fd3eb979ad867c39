"""When to stop early: time is up, or the user pressed Ctrl-C."""

import math
import signal
import threading
import time
from typing import Any


class StopSwitch:
    """Asks long work to end at its next look. Inside the `with` block the first Ctrl-C sets it; a second one raises."""

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._begun, self._limit_s = time.monotonic(), time_limit_s
        self._interrupted = False
        self._previous: Any = None

    @property
    def reason(self) -> str | None:
        """Why to stop, or `None` to go on."""
        if self._interrupted:
            return "interrupted"
        return "time limit" if self.used > 1 else None

    @property
    def used(self) -> float:
        """The part of the time limit that has passed, 0 without one."""
        if self._limit_s is None:
            return 0.0
        return (time.monotonic() - self._begun) / self._limit_s if self._limit_s > 0 else math.inf

    def _interrupt(self, signum, frame) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def __enter__(self) -> "StopSwitch":
        # Only the main thread may handle signals; elsewhere Ctrl-C is not ours to catch.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
