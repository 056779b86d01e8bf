"""What a person sees of training: a progress line, and curves in TensorBoard or trackio."""

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.config import Run
from pipeline.errors import ConfigError
from pipeline.progress import LOG_INTERVAL_S
from pipeline.train.checkpoint import Progress


class Reporter:
    """Called by the trainer after each step and validation; shows and logs what it is given."""

    def __init__(self, config: Run, folder: Path, total_steps: int, progress: Progress, *, enabled: bool):
        self.enabled, self.total_steps = enabled, total_steps
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total_steps,
            initial=progress.step,
            desc="train",
            unit="step",
            disable=not enabled,
            mininterval=0.5 if terminal else LOG_INTERVAL_S,
            dynamic_ncols=terminal,
        )
        self.log = _tracker(config, folder, progress.step) if enabled else _NoTracker()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.log.close()

    def begin(self, train_samples: int, validation_samples: int, parameters: int) -> None:
        """Say what is to be done."""
        if self.enabled:
            self.bar.write(
                f"train  {train_samples:,} samples to train on, {validation_samples:,} for validation, "
                f"{parameters / 1e6:.1f} M weights, {self.total_steps:,} steps",
                file=sys.stderr,
            )

    def __call__(self, kind: str, metrics: dict[str, float], progress: Progress) -> None:
        if not self.enabled or not metrics:
            return
        self.log.write({f"{kind}/{name}": value for name, value in metrics.items()}, progress.step)
        if kind == "validation":
            acceptance = " / ".join(
                f"{v:.2f}" for k, v in metrics.items() if k.startswith("acceptance_") and k[-1].isdigit()
            )
            self.bar.write(
                f"train  step {progress.step:,}: validation loss {metrics['loss']:.3f}, "
                f"acceptance length {metrics['acceptance_length']:.2f} ({acceptance})",
                file=sys.stderr,
            )
            return
        rate = progress.tokens / max(progress.seconds, 1e-9)
        self.bar.set_postfix_str(
            f"loss {metrics['loss']:.2f}, accepted {metrics['acceptance_length']:.2f}, {rate:,.0f} tok/s", refresh=False
        )
        self.bar.update()


class _NoTracker:
    def write(self, values: dict[str, float], step: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to close."""


class _TensorBoard(_NoTracker):
    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=done + 1)  # what came after the last checkpoint comes again

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


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
