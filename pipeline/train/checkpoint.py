"""Checkpoints: a folder that vLLM loads as it is, and what an exact resume needs beside it.

    step-00000232/
        config.json  model.safetensors               the draft, in the target's dtype, under vLLM's names
        trainer/progress.json                        step, metrics
        trainer/state.safetensors                    float32 weights and AdamW's moments
    best -> step-00000232                            highest acceptance length on the validation samples

vLLM loads every safetensors file of a folder, so the trainer's lie one deeper. A checkpoint appears whole, by one
rename. The data order, the learning rate and the noise are functions
of seed and step, so that no random state needs saving.
"""

import json
import math
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import InputError
from pipeline.store import atomic_folder, write_json
from pipeline.store.tensors import write_tensors
from pipeline.train.draft import Draft


@dataclass
class Progress:
    """Where a run stands: optimiser steps done, epoch and step within it, seconds and tokens so far."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def save(
    folder: Path, draft: Draft, optimizer: torch.optim.Optimizer, maps: dict[str, Tensor], progress: Progress
) -> Path:
    """Write `folder`/step-N atomically and return it."""
    path = folder / f"step-{progress.step:08d}"
    dtype = getattr(torch, str(draft.config.dtype).removeprefix("torch."))
    with atomic_folder(path) as temporary:
        weights = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in draft.weights().items()}
        write_tensors(temporary / "model.safetensors", {**weights, **maps}, ("format", "pt"))
        (temporary / "config.json").write_text(draft.config.to_json_string(use_diff=True))
        (temporary / "trainer").mkdir()
        write_tensors(temporary / "trainer/state.safetensors", _trainer_tensors(draft, optimizer))
        write_json(temporary / "trainer/progress.json", asdict(progress))
    return path


class Keeper:
    """Writes checkpoints of a run, points `best` at the best one and removes old ones."""

    def __init__(self, folder: Path, maps: dict[str, Tensor], keep: int):
        self.folder, self.maps, self.keep = folder, maps, keep

    def __call__(self, draft: Draft, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save where the run stands. Without validation samples the newest checkpoint is the best."""
        best = self.best_value()
        path = save(self.folder, draft, optimizer, self.maps, progress)
        if progress.metrics.get("acceptance_length", math.inf) >= best:
            self._mark_best(path)
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            if old.resolve() != (self.folder / "best").resolve():
                shutil.rmtree(old)

    def best_value(self) -> float:
        """Acceptance length that the best checkpoint so far had on the validation samples."""
        best = self.folder / "best" / "trainer/progress.json"
        return (
            json.loads(best.read_text())["metrics"].get("acceptance_length", -math.inf) if best.is_file() else -math.inf
        )

    def _mark_best(self, path: Path) -> None:
        temporary = self.folder / ".best.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(self.folder / "best")


def newest(folder: Path) -> Path | None:
    """The checkpoint with the most steps."""
    return max(folder.glob("step-*"), default=None, key=lambda p: p.name)


def restore(path: Path, draft: Draft, optimizer: torch.optim.Optimizer) -> Progress:
    """Load weights and optimiser state in place. Raises InputError for a checkpoint of another shape."""
    try:
        tensors = load_file(path / "trainer/state.safetensors")
        progress = Progress(**json.loads((path / "trainer/progress.json").read_text()))
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.copy_(tensors[f"weight/{name}"])
                if not parameter.requires_grad:
                    continue
                optimizer.state[parameter] = {  # the fused AdamW wants its step counter beside the weights, too
                    key: tensors[f"{key}/{name}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"train: {path} cannot be resumed ({error}). Remove it: the one before it is used") from None
    return progress


def _trainer_tensors(draft: Draft, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors
