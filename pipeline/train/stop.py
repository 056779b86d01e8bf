"""SIGINT and SIGTERM while a draft is trained: the step in hand is done and saved, then the process ends, in 60 s.

A signal that comes before the first step ends the process at once, as there is nothing to save. A second one ends it at
once, whatever it does: the checkpoints that are there are whole, as after SIGKILL.

One of several processes only notes signals: all of them stop at the same step (`Trainer` asks each at each step), and
who started them (pipeline.train.launch, torchrun) may pass on what the terminal has sent to each already.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipeline.errors import Stopped

EXIT_S = 57.0
"""For everything: the step in hand, a checkpoint that is being written, the last one. Then the process is ended."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within the block, the signals do what this module says; ignored ones stay ignored.

    `received` is the first one's number, 0 before. Outside of the main thread, which alone may handle signals, nothing
    changes.
    """

    def __init__(self, *, alone: bool = True):
        self.alone = alone
        self.received = 0
        self._in_hand = False
        self._old: dict[int, Any] = {}
        self._told = -1
        """Where the handler writes the signal's number to: it may take no lock, this thread could hold it."""

    def __enter__(self) -> "StopSignals":
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
            os.close(self._told)

    @contextmanager
    def steps_in_hand(self) -> Iterator[None]:
        """Where a signal waits for the end of a step: who works there looks at `received`."""
        self._in_hand = True
        try:
            yield
        finally:
            self._in_hand = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received:
            return  # of one of several: the sender of the first one passes it on
        self.received = number
        os.write(self._told, bytes([number]))
        if not self.alone:
            return
        for each in self._old:
            signal.signal(each, signal.SIG_DFL)  # the kernel's own: also when this thread is in foreign code
        if not self._in_hand:
            raise Stopped(number)
        say()


def _end_late(listens: int) -> None:
    """End the process EXIT_S after a number has come, unless the other end is closed before."""
    number = os.read(listens, 1)
    if number and not select.select([listens], [], [], EXIT_S)[0]:
        os._exit(128 + number[0])
    os.close(listens)


def say() -> None:
    """Past Python's buffers, which a signal's handler may have interrupted."""
    line = f"train: stops when the step in hand is done and saved, in {EXIT_S:.0f} s at the latest; once more: at once"
    os.write(2, f"{line}\n".encode())
