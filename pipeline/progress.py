"""How progress and times are shown, in every step alike."""

import sys
import threading
import time
from dataclasses import dataclass, field

LOG_INTERVAL_S = 30.0
"""Where the output is no terminal, a line this often instead of a bar."""
BAR_INTERVAL_S = 0.5
JSON_INTERVAL_S = 5.0
"""For other programs (`extract.progress_json`, `train.progress_json`)."""


def clock(seconds: float) -> str:
    """724 -> '12:04', 4920 -> '1 h 22'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02d}" if hours else f"{minute}:{second:02d}"


def scaled(number: float) -> str:
    """26_200_000 -> '26.2 M'."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f} "


@dataclass
class Meter:
    """Bytes read, and how fast: a bar on a terminal, a line every 30 s elsewhere."""

    name: str
    total: int
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)
    _begun_s: float = field(default_factory=time.monotonic)
    _end_s: float | None = None

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size

    def line(self) -> str:
        """`5.7 TB in 31:12, 3,045 MB/s`."""
        seconds = max((self._end_s or time.monotonic()) - self._begun_s, 1e-9)
        return f"{scaled(self.done)}B in {clock(seconds)}, {self.done / seconds / 1e6:,.0f} MB/s"

    def __enter__(self) -> "Meter":
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_s = time.monotonic()
        self._closed.set()
        self._thread.join()

    def _show(self) -> None:
        terminal = sys.stderr.isatty()
        while not self._closed.wait(BAR_INTERVAL_S if terminal else LOG_INTERVAL_S):
            share = f"{self.done / max(self.total, 1):.0%} of {scaled(self.total)}B"
            text = f"{self.name}  {share}  {self.line()}"
            print(f"\r{text}\x1b[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
