"""Ctrl-C at safe places only."""

import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit code that shells have for it: 128 + SIGINT


class Interrupts:
    """Inside the block the first Ctrl-C waits for the next `check`; a second one raises at once.

    In the middle of JAX, an interrupt can crash the process, or get lost in a callback that ignores it.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous: Any = None

    def check(self) -> None:
        """Raise `KeyboardInterrupt` where one is waiting."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        # Only the main thread may handle signals, and a process that was told to ignore Ctrl-C goes on doing so.
        if threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGINT)
            if current is not signal.SIG_IGN:
                self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
