"""Progress of an extraction: one line, renewed on a terminal, printed every 30 s elsewhere."""

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from pipeline.progress import LOG_INTERVAL_S, clock, scaled


@dataclass
class Progress:
    """Counts samples and tokens; what an earlier run has done counts as done, but not for the speed."""

    folder: Path
    samples: int
    tokens: int
    done_samples: int = 0
    done_tokens: int = 0
    written_bytes: int = 0
    _start: float = field(default_factory=time.monotonic)
    _shown: float = field(default_factory=time.monotonic)
    _new_tokens: int = 0
    _bar: "tqdm | None" = None

    def __post_init__(self) -> None:
        if sys.stderr.isatty():
            self._bar = tqdm(total=0, bar_format="{desc}", leave=False)

    def begin(self) -> None:
        """The engine is ready: time counts from here."""
        self._start = self._shown = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def tokens_per_s(self) -> float:
        return self._new_tokens / max(self.elapsed_s, 1e-9)

    def advance(self, tokens: int) -> None:
        """One sample more."""
        self.done_samples += 1
        self.done_tokens += tokens
        self._new_tokens += tokens
        if self._bar is not None:  # samples come in bursts, a group at a time: the last one must show
            self._bar.set_description_str(self.line())
        elif time.monotonic() - self._shown >= LOG_INTERVAL_S:
            self._shown = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        left_s = (self.tokens - self.done_tokens) / max(self.tokens_per_s, 1e-9)
        return "  ".join(
            [
                "extract",
                f"{self.done_samples:,}/{self.samples:,} samples",
                f"{scaled(self.done_tokens)}tok",
                f"{self.tokens_per_s:,.0f} tok/s",
                f"{scaled(self.written_bytes)}B written, {scaled(shutil.disk_usage(self.folder).free)}B free",
                f"{clock(self.elapsed_s)} elapsed, about {clock(left_s)} left",
            ]
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
