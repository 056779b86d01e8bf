"""A progress bar on a terminal, a line every half minute in a log."""

import sys
import time
from types import TracebackType

from pipeline.progress import LOG_INTERVAL_S, clock


class Progress:
    """Counts answers and their tokens; shows tokens/s and the time left.

    The time left is guessed from the answers that are done, so a log does not show it before `settled` of them are: the
    first ones come when a whole batch has been worked on for a while.
    """

    def __init__(self, step: str, total: int, done: int = 0, settled: int = 1):
        self._step, self._total, self._done, self._first = step, total, done, done
        self._settled = settled
        self._start = self._shown = time.monotonic()
        self._tokens = 0
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=step, unit=" answers", dynamic_ncols=True)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of this run, not of the one that it continues, over its time so far."""
        return self._tokens / max(time.monotonic() - self._start, 1e-9)

    def add(self, tokens: int) -> None:
        """One answer of `tokens` tokens is done."""
        self._done += 1
        self._tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.tokens_per_s:,.0f} tok/s", refresh=False)
            self._bar.update()
        elif time.monotonic() - self._shown >= LOG_INTERVAL_S:
            self._shown = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._bar is not None:
            self._bar.close()

    def _line(self) -> str:
        elapsed_s = time.monotonic() - self._start
        line = (
            f"{self._step}  {self._done:,}/{self._total:,} answers  {self.tokens_per_s:,.0f} tok/s  "
            f"{clock(elapsed_s)} elapsed"
        )
        if (done := self._done - self._first) >= self._settled:
            line += f", about {clock(elapsed_s / done * (self._total - self._done))} left"
        return line
