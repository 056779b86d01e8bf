"""SIGINT and SIGTERM while states are made: the shard in hand is finished (by engine `stream` also those that wait for
the disk). One that takes too long is given up. The rest is as everywhere: pipeline.stop.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from pipeline.errors import Stopped, UserError
from pipeline.stop import StopSignals, notice, say

GRACE_S = 45.0
"""For the shards in hand. Kimi's 65,536 tokens take 9 s at 7,350 tok/s, 75 s at 876: that one is then given up. Ending
vLLM's workers takes up to 8 s more."""


class ShardSignals(StopSignals):
    """Within the block, the signals do what this module says. Raises Stopped."""

    def __init__(self) -> None:
        super().__init__(notice("extract", "the shard in hand is finished", GRACE_S))

    def __enter__(self) -> Self:
        super().__enter__()
        if self._old:
            self._old_alarm = signal.signal(signal.SIGALRM, self._too_long)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._old:
            signal.signal(signal.SIGALRM, self._old_alarm)

    @contextmanager
    def shard_in_hand(self) -> Iterator[None]:
        """What is to be finished before a signal counts. Raises Stopped afterwards when there was one."""
        try:
            with self.in_hand():
                yield
        except (UserError, OSError):
            raise
        except Exception as error:  # a signal to all of a terminal's processes may have ended the engine's workers too
            if not self.received:
                raise
            say(f"extract: the shard in hand could not be finished: {error}")
        finally:
            if self.received:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.received:
            raise Stopped(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first = not self.received
        super()._note(number, frame)
        if first:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _too_long(self, _number: int, _frame: FrameType | None) -> None:
        if self._in_hand:
            say("extract: the shard in hand takes too long and is given up; the finished ones are kept")
            raise Stopped(self.received)
