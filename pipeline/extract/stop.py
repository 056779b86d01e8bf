"""SIGINT and SIGTERM while states are made: the shard in hand is finished (by engine `stream` also those that wait for
the disk), then the process ends, within a minute.

A signal that comes while no shard is in hand (the target is loaded, checksums are read) ends the step at once. A second
one ends the process at once, whatever it does: what it had finished is kept, as after SIGKILL.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipeline.errors import Stopped, UserError

GRACE_S = 45.0
"""For the shards in hand. Kimi's 65,536 tokens take 9 s at 7,350 tok/s, 75 s at 876: that one is then given up."""
EXIT_S = 57.0
"""For everything. Ending vLLM's workers takes up to 8 s; a process that hangs in foreign code is ended without."""


class StopSignals:
    """Within the block, the signals do what this module says; ignored ones stay ignored. Raises Stopped.

    Outside of the main thread, which alone may handle signals, nothing changes.
    """

    def __init__(self) -> None:
        self.received = 0
        self._in_hand = False
        self._old: dict[int, Any] = {}
        self._end: threading.Timer | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if (old := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._old[number] = old or signal.SIG_DFL  # None: not Python's
                    signal.signal(number, self._first)
            self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_long)
        return self

    def __exit__(self, *_: object) -> None:
        if self._end:
            self._end.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def shard_in_hand(self) -> Iterator[None]:
        """What is to be finished before a signal counts. Raises Stopped afterwards when there was one."""
        self._in_hand = True
        try:
            yield
        except (UserError, OSError):
            raise
        except Exception as error:  # a signal to all of a terminal's processes may have ended the engine's workers too
            if not self.received:
                raise
            _say(f"extract: the shard in hand could not be finished: {error}")
        finally:
            self._in_hand = False
            if self.received:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.received:
            raise Stopped(self.received)

    def _first(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        # The kernel's own, also when this thread is in foreign code. Process 1 of a container it leaves alone
        again = signal.SIG_DFL if os.getpid() != 1 else lambda number, _frame: os._exit(128 + number)
        for each in self._old.keys() - {signal.SIGALRM}:
            signal.signal(each, again)
        self._end = threading.Timer(EXIT_S, os._exit, [128 + number])
        self._end.daemon = True
        self._end.start()
        if not self._in_hand:
            raise Stopped(number)
        _say(f"extract: stops when the shard in hand is finished, in {GRACE_S:.0f} s at the latest; once more: at once")
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _too_long(self, _number: int, _frame: FrameType | None) -> None:
        if self._in_hand:
            _say("extract: the shard in hand takes too long and is given up; the finished ones are kept")
            raise Stopped(self.received)


def _say(line: str) -> None:
    """Past Python's buffers, which a signal's handler may have interrupted."""
    os.write(2, f"{line}\n".encode())
