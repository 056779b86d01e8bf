"""A training of some ten steps in this process, on states that the target computed for random ids."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline import vocab
from pipeline.config import Run, load
from pipeline.store import read_manifest
from tests.models import Reference
from tests.training import Answers, make_hidden, write_config

TRAIN = {
    "epochs": 3, "learning_rate": 1e-3, "rows_per_step": 2, "tokens_per_row": 64, "validation_share": 0.2,
    "noise": 0.05, "checkpoint_steps": 2, "tracker": "tensorboard", "processes": 1,
}  # fmt: skip


def make_inputs(llama_folder: Path) -> Answers:
    """Random prompts and answers of the tiny Llama."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, 4 + i % 9).tolist() for i in range(14)]
    return Reference(llama_folder), prompts, [random.integers(0, 256, 20).tolist() for _ in prompts]


def make_run(folder: Path, llama_folder: Path, inputs: Answers, name: str = "run", **train: Any) -> Run:
    """A run `name` in a folder, up to its hidden/ and vocab/; `train` adds to TRAIN."""
    (folder / name).mkdir()
    path = write_config(folder / name / "run.toml", llama_folder, train={**TRAIN, **train}, target={"max_length": 64})
    config = load(path)
    make_hidden(config, *inputs)
    vocab.run(config)
    return config


def folder(config: Run) -> Path:
    """Its checkpoints."""
    return config.folder("checkpoints")


def curve(config: Run) -> list[tuple[int, float]]:
    """As TensorBoard shows it: a run's file takes the place of what earlier ones have from its first step on.

    TensorBoard sorts files by name: two of one process and second, numbered 9 and 10, stand the wrong way round.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[int, float] = {}
    for file in sorted((folder(config) / "logs").iterdir(), key=lambda path: int(path.name.rpartition(".")[2])):
        events = EventAccumulator(str(file))
        events.Reload()
        if "train/loss" not in events.Tags()["scalars"]:
            continue
        scalars = events.Scalars("train/loss")
        values = {step: value for step, value in values.items() if step < scalars[0].step}
        values |= {event.step: event.value for event in scalars}
    return sorted(values.items())


def total_steps(config: Run) -> int:
    """Of a run that is done."""
    return read_manifest(folder(config), "train").totals["steps"]
