"""Ends a command before its work does: at Ctrl-C or a time limit, whatever its main thread is at.

While XLA compiles, Python handles no signal, and a search looks at its limit between steps alone. Another thread keeps
what is there, and ends the process.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxmoe.files import abandon_writes

INTERRUPTED = 130  # the exit code that shells have for it: 128 + SIGINT
ORDERLY_S = 1.5  # that a first Ctrl-C leaves for an orderly end
GRACE_S = 1.0  # that a second one leaves; and the most that last words take

_is_own = threading.Event()  # set where the process is the command's own, and may be ended
_ending = threading.Lock()
_last_words: list[Callable[[str], object]] = []  # of what runs now, the innermost last


def watch() -> None:
    """From here on Ctrl-C ends this process in time, a second one sooner; unless it was told to ignore Ctrl-C."""
    _is_own.set()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets a byte for each signal, whatever Python is at

    def look() -> None:
        pressed = 0
        while True:
            pressed += (now := os.read(reader, 16).count(signal.SIGINT))
            if now:
                end_within(ORDERLY_S if pressed == 1 else GRACE_S, "interrupted", lambda: INTERRUPTED)

    threading.Thread(target=look, daemon=True).start()


def end_within(seconds: float, reason: str, code: Callable[[], int]) -> None:
    """End this process after so many seconds where it still runs then, if it is a command's own."""
    if _is_own.is_set():
        _later(seconds, lambda: _end(reason, code))


@contextmanager
def last_words(say: Callable[[str], object]) -> Iterator[None]:
    """Where the process is ended in here, `say(reason)` first; the innermost come first, and nothing half written."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def _end(reason: str, code: Callable[[], int]) -> None:
    _ending.acquire()  # for good: a process ends once
    _later(GRACE_S, lambda: os._exit(INTERRUPTED))  # where last words hang
    abandon_writes()
    for say in reversed(_last_words):
        try:
            say(reason)
        except Exception:
            traceback.print_exc()  # what is left to say is no less worth
    os._exit(code())


def _later(seconds: float, do: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()
