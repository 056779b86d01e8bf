"""Checkpoints: a folder that vLLM loads as it is, and what an exact resume needs beside it.

    step-00000232/
        config.json  model.safetensors               the draft, in the target's dtype, under vLLM's names
        trainer/progress.json                        step, place in the epoch, metrics
        trainer/state.safetensors                    float32 weights and the optimiser's moments
        trainer/random.safetensors                   the processes' random number generators
    best -> step-00000232                            highest acceptance length on the validation samples
    last -> step-00000240                            the newest

vLLM loads every safetensors file of a folder, so the trainer's lie one deeper. A checkpoint appears whole, by one
rename. The data order, the learning rate and the noise are functions of seed and step.

What is to be written is copied to host memory between two steps; a thread writes it while training goes on.
"""

import json
import math
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import NO_ROOM, InputError
from pipeline.store import atomic_folder, write_json
from pipeline.store.tensors import write_tensors
from pipeline.train.draft import Draft
from pipeline.train.optimizer import ADAMW_KEEPS, MUON_KEEPS, moment_names, moments, owns
from pipeline.train.randomness import State, set_random_state
from pipeline.train.sharding import full, part

KEPT = (*ADAMW_KEEPS, *MUON_KEEPS)
"""All that a checkpoint may hold of a weight beside itself."""


@dataclass
class Progress:
    """Where a run stands: optimiser steps done, epoch and step within it, seconds and tokens so far.

    `step` counts those that were skipped (train.on_nonfinite), too; `skipped` says how many these are.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the validation at this step; empty where there was none."""


class Keeper:
    """Writes checkpoints of a run, points `best` and `last` to the right ones and removes old ones.

    The first process has it; the others go through `trainer_tensors` when it saves. Within a `with` block, whose end
    waits for what is being written. Host memory: `snapshot_bytes` at the first save, kept from then on, and the draft
    in its own dtype while it is written.
    """

    def __init__(
        self,
        folder: Path,
        maps: dict[str, Tensor],
        keep: int,
        *,
        validated: bool = False,
        on_full_disk: Literal["stop", "continue"] = "stop",
        saved: Callable[[Path], None] = lambda _: None,
    ):
        self.folder, self.maps, self.keep, self.validated = folder, maps, keep, validated
        self.on_full_disk, self.saved = on_full_disk, saved
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.wait(last=True)
        elif self._thread:
            self._thread.join()  # the fault that is under way is told, not a second one

    def __call__(
        self, draft: Draft, optimizer: torch.optim.Optimizer, progress: Progress, generators: Sequence[State] = ()
    ) -> None:
        """Copy where the run stands and have it written; waits for the one before, and raises what that has met.

        Without validation samples the newest checkpoint is the best; with some, one that was not validated is not.
        """
        self.wait()
        self._snapshot(trainer_tensors(draft, optimizer))
        names = list(draft.weights())
        dtype = getattr(torch, str(draft.config.dtype).removeprefix("torch."))
        config = draft.config.to_json_string(use_diff=True)
        progress = replace(progress, metrics=dict(progress.metrics))

        def write() -> None:
            try:
                self._write(names, dtype, config, progress, generators)
            except BaseException as error:  # noqa: BLE001 (raised by wait)
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def wait(self, *, last: bool = False) -> None:
        """Until nothing is being written. Raises what the writing has met; a full disk only where that is to stop, or
        at the `last` one, without which the run is not done."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        if full and self.on_full_disk == "continue" and not last:
            kept = newest(self.folder)
            print(
                f"train: no room for a checkpoint ({error}): {kept.name if kept else 'none'} is kept",
                file=sys.stderr,
            )
            return
        raise error

    def check(self) -> None:
        """As `wait`, of what has been written: a fault is told now and not when the next checkpoint is due."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def tidy(self) -> None:
        """After a process that was killed: point `last` and `best` as it would have; what it left half made goes."""
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left)
        self._point_to_both()

    def _point_to_both(self) -> None:
        """`last` is the newest; `best` the one with the highest value, of equal ones the newest."""
        there = sorted(self.folder.glob("step-*"))
        if there:
            self._point("last", there[-1])
        if (best := max(((self._value(path), path) for path in there), default=None)) and best[0] > -math.inf:
            self._point("best", best[1])

    def _value(self, path: Path) -> float:
        """What chooses `best`. Without validation samples all are equal; with some, one not validated has no chance."""
        try:
            metrics = json.loads((path / "trainer/progress.json").read_text())["metrics"]
        except (OSError, ValueError, KeyError):
            return -math.inf  # damaged: `restore` says so when it is needed
        return metrics.get("acceptance_length", -math.inf if self.validated else math.inf)

    def best_value(self) -> float:
        """Acceptance length that the best checkpoint so far had on the validation samples."""
        return self._value(self.folder / "best")

    def _snapshot(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies in memory that is used again: the same tensors come each time, and fresh memory costs as much."""
        self._host = {
            name: self._host[name].copy_(tensor) if name in self._host else tensor.to("cpu", copy=True).contiguous()
            for name, tensor in tensors
        }

    def _write(
        self, names: list[str], dtype: torch.dtype, config: str, progress: Progress, generators: Sequence[State]
    ) -> None:
        path = self.folder / f"step-{progress.step:08d}"
        if path.exists():  # a run has gone on from it, and nothing but its validation is new
            write_json(path / "trainer/progress.json", asdict(progress))
        else:
            self._write_folder(path, names, dtype, config, progress, generators)
        self._point_to_both()
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            if old.resolve() != (self.folder / "best").resolve():
                shutil.rmtree(old)
        self.saved(path)

    def _write_folder(
        self,
        path: Path,
        names: list[str],
        dtype: torch.dtype,
        config: str,
        progress: Progress,
        generators: Sequence[State],
    ) -> None:
        with atomic_folder(path) as temporary:
            weights = {name: self._host[f"weight/{name}"].to(dtype) for name in names}
            write_tensors(temporary / "model.safetensors", {**weights, **self.maps}, ("format", "pt"), checksum=False)
            (temporary / "config.json").write_text(config)
            (temporary / "trainer").mkdir()
            write_tensors(temporary / "trainer/state.safetensors", self._host, checksum=False)
            states = {f"{rank}/{name}": t for rank, state in enumerate(generators) for name, t in state.items()}
            write_tensors(temporary / "trainer/random.safetensors", states)
            write_json(temporary / "trainer/progress.json", asdict(progress))

    def _point(self, name: str, path: Path) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(self.folder / name)


def snapshot_bytes(parameters: int, moments_bytes: int, dtype: torch.dtype) -> int:
    """Host memory of a Keeper while it writes, and what it writes but for the word map and some kB: float32 weights,
    their moments, the draft in its dtype."""
    return (4 + dtype.itemsize) * parameters + moments_bytes


def newest(folder: Path) -> Path | None:
    """The checkpoint with the most steps."""
    return max(folder.glob("step-*"), default=None, key=lambda p: p.name)


def restore(path: Path, draft: Draft, optimizer: torch.optim.Optimizer, rank: int = 0) -> Progress:
    """Load weights, optimiser state and this process's random number generators in place.

    A process that had none in the run that saved (there were fewer) keeps its own. Raises InputError for a checkpoint
    of another shape.
    """
    try:
        tensors = load_file(path / "trainer/state.safetensors")
        progress = Progress(**json.loads((path / "trainer/progress.json").read_text()))
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.copy_(part(tensors[f"weight/{name}"], parameter))
                there = any(f"{key}/{name}" in tensors for key in KEPT)
                if not parameter.requires_grad or (progress.skipped and not there):
                    continue
                saved = {key: tensors[f"{key}/{name}"] for key in moment_names(optimizer, parameter)}
                if not owns(optimizer, parameter):
                    continue
                optimizer.state[parameter] = {  # the fused AdamW wants its step counter beside the weights, too
                    key: value.to(parameter.device) if key == "step" else part(value, parameter)
                    for key, value in saved.items()
                }
        _restore_random(path / "trainer/random.safetensors", rank)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"train: {path} cannot be resumed ({error}). Remove it: the one before it is used") from None
    return progress


def _restore_random(file: Path, rank: int) -> None:
    if not file.is_file():  # of a version that saved none
        return
    own = {name.partition("/")[2]: t for name, t in load_file(file).items() if name.startswith(f"{rank}/")}
    if own:
        set_random_state(own)


def trainer_tensors(draft: Draft, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Weights and what the optimiser keeps of them, each whole, by name.

    What is sharded, or shared out, is gathered as its turn comes: all processes go through it together, whether they
    need it or not.
    """
    for name, parameter in draft.named_parameters():
        yield f"weight/{name}", full(parameter.detach())
        for key, value in moments(optimizer, parameter).items():
            yield f"{key}/{name}", full(value.detach())
