"""What a person sees of training: progress, told by a thread of its own, and curves in TensorBoard or trackio.

A bar on a terminal; elsewhere a line every 30 s, also while a step hangs. For other programs JSON lines as well
(`train.progress_json`); on stderr they take the place of the lines. docs/formats.md says what is in them.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.config import Run
from pipeline.errors import ConfigError
from pipeline.gpu_use import GpuMonitor, gpu_text
from pipeline.progress import BAR_INTERVAL_S, JSON_INTERVAL_S, LOG_INTERVAL_S, clock
from pipeline.store.json_lines import JsonLines
from pipeline.train.checkpoint import Progress

WINDOW_STEPS = 200
"""Speed and time left are those of so many steps, validations and saves between them included."""


class Reporter:
    """Called by the trainer after each step and validation; shows and logs what it is given."""

    def __init__(self, config: Run, folder: Path, total_steps: int, progress: Progress, *, enabled: bool):
        self.enabled, self.total_steps, self.progress = enabled, total_steps, progress
        target = config.train.progress_json if enabled else None
        self.json, self.json_on_stderr = _json_lines(target) if target else None, target == "-"
        self.log = _tracker(config, folder, progress.step) if enabled else _NoTracker()
        self.gpus = GpuMonitor() if enabled else None
        self._last: dict[str, float] = {}
        self._waited_s = 0.0
        self._begun_s = self._logged_s = self._json_s = time.monotonic()
        self._window: deque[tuple[float, int, int, float]] = deque(maxlen=WINDOW_STEPS)
        self._bar: tqdm | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Reporter":
        if not self.enabled:
            return self
        if sys.stderr.isatty() and not self.json_on_stderr:
            self._bar = tqdm(total=self.total_steps, initial=self.progress.step, leave=False, dynamic_ncols=True,
                             bar_format="train {percentage:3.0f}%|{bar:12}| {desc}")  # fmt: skip
        self._tell("start")
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.enabled:
            self._closed.set()
            self._thread.join()
        if self._bar is not None:
            self._bar.close()
        stopped = error is not None and issubclass(error, KeyboardInterrupt)
        self._tell("end", outcome="stopped" if stopped else "failed" if error else "done")
        if self.json is not None:
            self.json.close()
        self.log.close()

    def begin(self, train_samples: int, validation_samples: int, parameters: int) -> None:
        """Say what is to be done."""
        self.say(
            f"train  {train_samples:,} samples to train on, {validation_samples:,} for validation, "
            f"{parameters / 1e6:.1f} M weights, {self.total_steps:,} steps"
        )

    def __call__(self, kind: str, metrics: dict[str, float], progress: Progress) -> None:
        if not self.enabled or not metrics:
            return
        if kind == "validation":
            self.log.write(_under(kind, metrics), progress.step)
            self.say(
                f"train  step {progress.step:,}: validation loss {metrics['loss']:.3f}, "
                f"acceptance length {metrics['acceptance_length']:.2f} ({_positions(metrics)})"
            )
            self._tell("validation", validation=metrics)
            return
        self._waited_s += metrics.get("waited_s", 0.0)
        self._window.append((time.monotonic(), progress.tokens, progress.step, self._waited_s))
        if "loss" in metrics:  # a step that was skipped has none
            self._last = metrics
        more = {"tokens_per_second": self.tokens_per_s} if len(self._window) > 1 else {}
        if used := self._gpus():
            more["gpu_memory_gib"] = max(gpu.memory_bytes for gpu in used) / 2**30
        self.log.write(_under(kind, {**metrics, **more}), progress.step)

    def saved(self, path: Path) -> None:
        """A checkpoint is whole."""
        self._tell("checkpoint", checkpoint=str(path))

    # ---- What is known

    def _rate(self, what: int) -> float:
        """Of column `what` of the window, a second."""
        if len(self._window) < 2:
            return 0.0
        first, last = self._window[0], self._window[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """All processes together."""
        return self._rate(1)

    @property
    def left_s(self) -> float | None:
        rate = self._rate(2)
        return (self.total_steps - self.progress.step) / rate if rate else None

    def line(self) -> str:
        """All of it for a person."""
        elapsed, last, left = time.monotonic() - self._begun_s, self._last, self.left_s
        parts = [f"train  step {self.progress.step:,}/{self.total_steps:,}"]
        if last:
            parts += [f"loss {last['loss']:.3f}", f"accepted {last['acceptance_length']:.2f} ({_positions(last)})"]
        if self.tokens_per_s:
            parts += [f"{self.tokens_per_s:,.0f} tok/s"]
        parts += gpu_text(self._gpus())
        if self._rate(3) >= 0.01:
            parts += [f"{100 * self._rate(3):.0f} % waiting for data"]
        if self.progress.skipped:
            parts += [f"{self.progress.skipped:,} steps skipped"]
        parts += [f"{clock(elapsed)} elapsed" + (f", about {clock(left)} left" if left else "")]
        return "  ".join(parts)

    def facts(self, event: str) -> dict[str, Any]:
        """The same for a program."""
        last, progress = self._last, self.progress
        return {
            "event": event,
            "time": round(time.time(), 3),
            "step": "train",
            "done_steps": progress.step,
            "steps": self.total_steps,
            "skipped_steps": progress.skipped,
            "epoch": progress.epoch,
            "tokens": progress.tokens,
            "loss": last.get("loss"),
            "acceptance_length": last.get("acceptance_length"),
            "acceptance": _each_position(last),
            "learning_rate": last.get("learning_rate"),
            "gradient_norm": last.get("gradient_norm"),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "waiting_share": round(self._rate(3), 4),
            "elapsed_s": round(time.monotonic() - self._begun_s, 3),
            "left_s": None if (left := self.left_s) is None else round(left, 3),
            "gpus": [asdict(gpu) for gpu in self._gpus()],
        }

    # ---- The thread

    def _run(self) -> None:
        while not self._closed.wait(BAR_INTERVAL_S):
            with contextlib.suppress(RuntimeError):  # the window changed meanwhile: the next time, then
                self.tick()

    def tick(self) -> None:
        """Show what is due."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.n = self.progress.step
            self._bar.set_description_str(self.line().removeprefix("train").strip())
        elif now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            if not self.json_on_stderr:
                print(self.line(), file=sys.stderr, flush=True)
        if now - self._json_s >= JSON_INTERVAL_S:
            self._json_s = now
            self._tell("progress")

    def _gpus(self) -> list[Any]:
        return self.gpus.read() if self.gpus else []

    def say(self, line: str) -> None:
        """A line for a person, above the bar."""
        if not self.enabled or self.json_on_stderr:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def _tell(self, event: str, **more: Any) -> None:
        if self.json is not None:
            self.json.write({**self.facts(event), **more})


def _under(kind: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in metrics.items()}


def _each_position(metrics: dict[str, float]) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith("acceptance_") and name[-1].isdigit()]


def _positions(metrics: dict[str, float]) -> str:
    return " / ".join(f"{value:.2f}" for value in _each_position(metrics))


def _json_lines(target: str) -> JsonLines:
    try:
        return JsonLines(target)
    except OSError as error:
        raise ConfigError(f"train: train.progress_json {target} cannot be written to ({error.strerror})") from None


class _NoTracker:
    def write(self, values: dict[str, float], step: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to close."""


class _TensorBoard(_NoTracker):
    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=done + 1)  # what came after the last checkpoint comes again
        self.broken = False

    def write(self, values: dict[str, float], step: int) -> None:
        with self._telling_once():
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._telling_once():
            self.writer.close()

    @contextlib.contextmanager
    def _telling_once(self) -> Iterator[None]:
        """Curves that the disk does not take do not end a training: what a full disk does is train.on_full_disk's."""
        if self.broken:
            return
        try:
            yield
        except OSError as error:
            self.broken = True
            print(f"train: no more curves are written ({error})", file=sys.stderr)


class _Trackio(_NoTracker):
    def __init__(self, config: Run):
        try:
            import trackio  # pyright: ignore[reportMissingImports]  (optional)
        except ImportError:
            raise ConfigError(
                "train: train.tracker is trackio, which is not installed. "
                "Add it: pip install trackio==0.20.2 'huggingface-hub<1'"
            ) from None
        self.run: Any = trackio.init(project="aerie", name=config.name, config=config.model_dump(mode="json"))

    def write(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def _tracker(config: Run, folder: Path, done: int) -> _NoTracker:
    if config.train.tracker == "tensorboard":
        return _TensorBoard(folder / "logs", done)
    return _Trackio(config) if config.train.tracker == "trackio" else _NoTracker()
