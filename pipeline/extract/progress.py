"""Progress of an extraction, told by a thread of its own, so that a step that hangs is seen to hang.

A bar on a terminal; elsewhere a line every 30 s. For other programs JSON lines as well (`extract.progress_json`); on
stderr they take the place of the lines. docs/formats.md says what is in them.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.gpu_use import GpuMonitor, gpu_text
from pipeline.progress import BAR_INTERVAL_S, JSON_INTERVAL_S, LOG_INTERVAL_S, clock, scaled
from pipeline.store.json_lines import JsonLines

FIRST_BURST_S = 0.5
"""The first samples come together, after a forward pass that compiles and warms up: the speed is counted after them."""


@dataclass
class Counts:
    """What is to be done, and what is done; what an earlier run has done is in `done_`, but not in the speed."""

    samples: int
    tokens: int
    shards: int = 0
    done_samples: int = 0
    done_tokens: int = 0
    done_shards: int = 0
    written_bytes: int = 0


@dataclass
class Speed:
    """Tokens per second after the first ones, and the time until those came."""

    begun_s: float
    first_s: float | None = None
    burst_s: float = 0.0
    """When the first burst ended."""
    tokens: int = 0
    steady_tokens: int = 0
    """Those after the first burst."""

    def add(self, tokens: int, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self.tokens += tokens
        if now_s - self.first_s > FIRST_BURST_S:
            self.steady_tokens += tokens
        else:
            self.burst_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Since the end of the first burst; of all, while there are no others."""
        if self.first_s is None:
            return 0.0
        if self.steady_tokens:
            return self.steady_tokens / (now_s - self.burst_s)
        return self.tokens / max(now_s - self.begun_s, 1e-9)


@dataclass
class Progress:
    """Counted by the step (`begin`, `advance`, `shard_done`), shown by a thread until `close`."""

    folder: Path
    counts: Counts
    part: str = "1/1"
    json: JsonLines | None = None
    json_on_stderr: bool = False
    now: Callable[[], float] = time.monotonic
    gpus: GpuMonitor | None = None
    start_s: float | None = None
    """What the engine took to start."""
    _opened_s: float = field(init=False)
    _speed: Speed | None = None
    _bar: "tqdm | None" = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _logged_s: float = field(init=False)
    _json_s: float = field(init=False)
    _told_first: bool = False
    _ended_s: float | None = None

    def __post_init__(self) -> None:
        self._opened_s = self._logged_s = self._json_s = self.now()

    def open(self) -> None:
        """Show from here on, the engine's start included."""
        if self.gpus is None:
            self.gpus = GpuMonitor()
        if sys.stderr.isatty() and not self.json_on_stderr:
            self._bar = tqdm(total=self.counts.tokens, initial=self.counts.done_tokens, leave=False, dynamic_ncols=True,
                             bar_format="extract {percentage:3.0f}%|{bar:12}| {desc}")  # fmt: skip
        self._tell("start")
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """The engine is ready: time counts from here."""
        now = self.now()
        self.start_s = now - self._opened_s
        self._speed = Speed(now)
        self._tell("ready")

    def end(self) -> None:
        """All states are there: what the engine's end takes is not in the speed."""
        self._ended_s = self.now()

    def advance(self, tokens: int) -> None:
        """One sample more."""
        self.counts.done_samples += 1
        self.counts.done_tokens += tokens
        if self._speed is not None:
            self._speed.add(tokens, self.now())

    def shard_done(self, size_bytes: int) -> None:
        """One file more."""
        self.counts.done_shards += 1
        self.counts.written_bytes += size_bytes
        self._tell("shard")

    def close(self, outcome: str = "done") -> None:
        """Show no more. `outcome` is told to other programs; harmless when called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.close()
        self._tell("end", outcome=outcome)
        if self.json is not None:
            self.json.close()

    # ---- What is known

    @property
    def elapsed_s(self) -> float:
        """Since the engine was ready."""
        return self._until_s - self._speed.begun_s if self._speed else 0.0

    @property
    def first_token_s(self) -> float | None:
        """From the engine's being ready to the first sample's states."""
        if self._speed is None or self._speed.first_s is None:
            return None
        return self._speed.first_s - self._speed.begun_s

    @property
    def tokens_per_s(self) -> float:
        return self._speed.tokens_per_s(self._until_s) if self._speed else 0.0

    @property
    def _until_s(self) -> float:
        return self.now() if self._ended_s is None else self._ended_s

    @property
    def left_s(self) -> float | None:
        speed = self.tokens_per_s
        return (self.counts.tokens - self.counts.done_tokens) / speed if speed else None

    def line(self) -> str:
        """All of it for a person."""
        counts = self.counts
        if self._speed is None:
            return f"extract  the engine is starting  {clock(self.now() - self._opened_s)} elapsed"
        parts = [
            "extract" if self.part == "1/1" else f"extract {self.part}",
            f"{counts.done_samples:,}/{counts.samples:,} samples",
            f"{scaled(counts.done_tokens)}tok",
            f"{self.tokens_per_s:,.0f} tok/s",
            *gpu_text(self.gpus.read() if self.gpus else []),
            f"{scaled(counts.written_bytes)}B written, {scaled(self._free())}B free",
            f"{clock(self.elapsed_s)} elapsed" + (f", about {clock(self.left_s)} left" if self.left_s else ""),
        ]
        return "  ".join(parts)

    def facts(self, event: str) -> dict[str, Any]:
        """The same for a program."""
        return {
            "event": event,
            "time": round(time.time(), 3),
            "step": "extract",
            "part": self.part,
            **asdict(self.counts),
            "start_s": _rounded(self.start_s),
            "first_token_s": _rounded(self.first_token_s),
            "elapsed_s": _rounded(self.elapsed_s),
            "left_s": _rounded(self.left_s),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "free_bytes": self._free(),
            "gpus": [asdict(gpu) for gpu in (self.gpus.read() if self.gpus else [])],
        }

    # ---- The thread

    def _run(self) -> None:
        while not self._closed.wait(BAR_INTERVAL_S):
            with contextlib.suppress(OSError):  # a folder that someone takes away is the step's to tell of
                self.tick()

    def tick(self) -> None:
        """Show what is due."""
        now = self.now()
        if not self._told_first and self.first_token_s is not None and self.start_s is not None:
            self._told_first = True
            text = (
                f"extract  the engine started in {clock(self.start_s)}, first states {self.first_token_s:.1f} s later"
            )
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            elif not self.json_on_stderr:
                print(text, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.n = self.counts.done_tokens
            self._bar.set_description_str(self.line().removeprefix("extract").strip())
        elif now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            if not self.json_on_stderr:
                print(self.line(), file=sys.stderr, flush=True)
        if now - self._json_s >= JSON_INTERVAL_S:
            self._json_s = now
            self._tell("progress")

    def _tell(self, event: str, **more: Any) -> None:
        if self.json is not None:
            self.json.write({**self.facts(event), **more})

    def _free(self) -> int:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:  # the step tells of it, when it writes
            return 0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
