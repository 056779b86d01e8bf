"""SIGINT and SIGTERM while a step has something in hand: that is finished, then the process ends, within a minute.

A signal that comes while nothing is in hand ends the step at once. A second one ends the process at once, whatever it
does: what it had finished is kept, as after SIGKILL.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from pipeline.errors import Stopped

EXIT_S = 57.0
"""For everything that follows a signal. Then the process is ended, also where it hangs in foreign code."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within the block, the signals do what this module says; ignored ones stay ignored.

    `received` is the first one's number, 0 before; who has something in hand looks at it. `notice` is then said. One
    that is not `alone` is one of several processes that must stop together: it only notes the signal, and of a second
    one nothing, as who started them may pass on what the terminal has sent to each already.
    Outside of the main thread, which alone may handle signals, nothing changes.
    """

    def __init__(self, notice: str, *, alone: bool = True):
        self.notice, self.alone = notice, alone
        self.received = 0
        self._in_hand = False
        self._old: dict[int, Any] = {}
        self._told = -1
        """Where the handler writes the signal's number to: it may take no lock, this thread could hold it."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            listens, self._told = os.pipe()
            threading.Thread(target=_end_late, args=[listens], name="end", daemon=True).start()
            for number in NUMBERS:
                if (old := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._old[number] = old or signal.SIG_DFL  # None: not Python's
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._told >= 0:
            os.write(self._told, bytes([0]))
            os.close(self._told)

    @contextmanager
    def in_hand(self) -> Iterator[None]:
        """Where a signal is not acted upon, but only noted in `received`, and told."""
        before, self._in_hand = self._in_hand, True
        try:
            yield
        finally:
            self._in_hand = before

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received:
            return
        self.received = number
        os.write(self._told, bytes([number]))
        if not self.alone:
            return
        # The kernel's own, also when this thread is in foreign code. Process 1 of a container it leaves alone
        again = signal.SIG_DFL if os.getpid() != 1 else lambda number, _frame: os._exit(128 + number)
        for each in self._old:
            signal.signal(each, again)
        if not self._in_hand:
            raise Stopped(number)
        say(self.notice)


def notice(step: str, what: str, limit_s: float) -> str:
    """What is said when a signal comes while something is in hand."""
    return f"{step}: stops when {what}, in {limit_s:.0f} s at the latest; once more: at once"


def say(line: str) -> None:
    """Past Python's buffers, which a signal's handler may have interrupted."""
    os.write(2, f"{line}\n".encode())


def _end_late(listens: int) -> None:
    """End the process EXIT_S after a signal's number has come, unless a zero comes before."""
    number = os.read(listens, 1)[0]
    if number and not select.select([listens], [], [], EXIT_S)[0]:
        os._exit(128 + number)
    os.close(listens)
