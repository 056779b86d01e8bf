"""The training loop: one process or several, the same losses either way."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.config import TrainSection
from pipeline.errors import InputError
from pipeline.train.checkpoint import Progress
from pipeline.train.data import Row, Rows
from pipeline.train.draft import Draft
from pipeline.train.loss import StepSums, TargetHead, compile_step, supervised_at, unroll

ReportFunction = Callable[[str, dict[str, float], Progress], None]


@dataclass(frozen=True)
class Place:
    """Where this process computes."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """The one process that writes and prints."""
        return self.rank == 0


class Unrolled(torch.nn.Module):
    """The draft with its loss as one module: what DistributedDataParallel needs to see."""

    def __init__(self, draft: Draft, target: TargetHead, section: TrainSection, place: Place):
        super().__init__()
        self.draft = draft
        self._target = [target]  # in a list: not a part of the module
        self.section, self.device_type = section, place.device.type

    def forward(self, row: Row, noise: Tensor | None, exact: bool, scale_K: Tensor | None = None) -> StepSums:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.section.autocast):
            return unroll(self.draft, self._target[0], row, self.section.ttt_steps, noise, exact=exact, scale_K=scale_K)


class Trainer:
    """Trains a draft over rows; `report(kind, metrics, progress)` hears of each step and validation."""

    def __init__(
        self,
        draft: Draft,
        target: TargetHead,
        train_rows: Rows,
        validation_rows: Rows | None,
        section: TrainSection,
        place: Place,
        seed: int,
    ):
        self.draft, self.section, self.place, self.seed = draft, section, place, seed
        self.train_rows, self.validation_rows = train_rows, validation_rows
        draft.lm_head.weight.requires_grad_(section.train_lm_head)
        self.optimizer = _optimizer(draft, section)
        self.module = Unrolled(draft, target, section, place)
        if place.device.type == "cuda":
            compile_step(draft, target)
        # buffers (the target's embedding: 4.7 GB for Kimi) do not change: they are not sent round at every step
        self.parallel = (
            DistributedDataParallel(self.module, broadcast_buffers=False) if place.world > 1 else self.module
        )
        self.total_steps = sum(train_rows.steps_in(epoch) for epoch in range(section.epochs))
        self.weights_K = section.ttt_decay ** torch.arange(section.ttt_steps, device=place.device)

    def run(self, progress: Progress, save: Callable[[Progress], None], report: ReportFunction) -> None:
        """Go on from `progress` to the last step. `save` is called where a checkpoint is due."""
        for epoch, step in self._remaining(progress):
            begun = time.monotonic()
            learning_rate = self._set_learning_rate(progress.step)
            metrics, tokens = self._step(epoch, step, progress.step)
            last_of_epoch = step + 1 == self.train_rows.steps_in(epoch)
            progress.step += 1
            progress.epoch, progress.step_in_epoch = (epoch + 1, 0) if last_of_epoch else (epoch, step + 1)
            progress.seconds += time.monotonic() - begun
            progress.tokens += tokens
            report("train", {**metrics, "learning_rate": learning_rate}, progress)
            if self._checkpoint_due(progress.step, last_of_epoch):
                progress.metrics = self.validate()
                report("validation", progress.metrics, progress)
                save(progress)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and simulated acceptance on the validation rows, exact against the target's own choice."""
        if self.validation_rows is None:
            return {}
        sums_3K = torch.zeros(3, self.section.ttt_steps, device=self.place.device)
        rows = self.validation_rows
        for step in range(rows.steps_in(0)):
            for row in rows.of_step(0, step, self.place.rank, self.place.world):
                sums_3K += _stacked(self.module(rows.load(row).to(self.place.device), None, True))
        return self._metrics(self._over_processes(sums_3K))

    def _remaining(self, progress: Progress) -> Iterator[tuple[int, int]]:
        for epoch in range(progress.epoch, self.section.epochs):
            first = progress.step_in_epoch if epoch == progress.epoch else 0
            for step in range(first, self.train_rows.steps_in(epoch)):
                yield epoch, step

    def _checkpoint_due(self, step: int, last_of_epoch: bool) -> bool:
        every = self.section.checkpoint_steps
        return step == self.total_steps or (last_of_epoch if every is None else step % every == 0)

    def _step(self, epoch: int, step: int, number: int) -> tuple[dict[str, float], int]:
        """One optimiser step. Loss and gradient are means over the supervised tokens of *all* processes' rows."""
        indices = self.train_rows.of_step(epoch, step, self.place.rank, self.place.world)
        rows = [self.train_rows.load(row).to(self.place.device) for row in indices]
        count_K = self._over_processes(torch.stack([_supervised_counts(row, self.section) for row in rows]).sum(0))
        self.optimizer.zero_grad(set_to_none=True)
        sums_3K = torch.zeros(3, self.section.ttt_steps, device=self.place.device)
        for i, row in enumerate(rows):
            parallel, last = self.parallel, i + 1 == len(rows)
            with parallel.no_sync() if isinstance(parallel, DistributedDataParallel) and not last else nullcontext():
                # DistributedDataParallel takes the mean over processes, the loss is a sum over them
                scale_K = self.weights_K * self.place.world / count_K.clamp(min=1)
                sums = parallel(row, self._noise(row, number, i), False, scale_K)
                sums.total.backward()
            sums_3K += _stacked(sums)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.section.clip_norm)
        metrics = self._metrics(self._over_processes(sums_3K)) | {"gradient_norm": float(norm)}
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
            names = [self.train_rows.reader.sample_ids[i] for row in indices for i in row]
            raise InputError(
                f"train: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']} at step {number}, "
                f"samples {', '.join(names[:4])}. Lower train.learning_rate or look at these samples"
            )
        self.optimizer.step()
        lengths_N = self.train_rows.reader.lengths_N
        tokens = sum(int(lengths_N[i]) for row in indices for i in row)
        return metrics, int(self._over_processes(torch.tensor([tokens])))

    def _noise(self, row: Row, number: int, index: int) -> Tensor | None:
        if self.section.noise == 0:
            return None
        place = index * self.place.world + self.place.rank
        generator = torch.Generator().manual_seed(hash((self.seed, number, place)) & (2**63 - 1))
        uniform = torch.rand(row.aux_RLH.shape, generator=generator) * 2 - 1
        return (uniform * self.section.noise).to(self.place.device)

    def _set_learning_rate(self, step: int) -> float:
        rate = self.section.learning_rate * schedule(step, self.total_steps, self.section)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _over_processes(self, values: Tensor) -> Tensor:
        if self.place.world > 1:
            values = values.to(self.place.device)
            dist.all_reduce(values)
        return values

    def _metrics(self, sums_3K: Tensor) -> dict[str, float]:
        loss_K, count_K, agreed_K = sums_3K.double().cpu()
        mean_K = loss_K / count_K.clamp(min=1)
        agreed_K = agreed_K / count_K.clamp(min=1)
        names = range(1, self.section.ttt_steps + 1)
        return {
            "loss": float((self.weights_K.cpu() * mean_K).sum()),
            "acceptance_length": 1 + float(agreed_K.sum()),
            **{f"loss_{k}": float(v) for k, v in zip(names, mean_K, strict=True)},
            **{f"acceptance_{k}": float(v) for k, v in zip(names, agreed_K, strict=True)},
        }


def schedule(step: int, total_steps: int, section: TrainSection) -> float:
    """Linear warm-up, then a cosine from 1 down to min_learning_rate_ratio at the last step."""
    warmup = max(1, round(section.warmup_ratio * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - 1 - warmup)
    low = section.min_learning_rate_ratio
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _optimizer(draft: Draft, section: TrainSection) -> torch.optim.AdamW:
    trained = [p for p in draft.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=True)


def _supervised_counts(row: Row, section: TrainSection) -> Tensor:
    return torch.stack([supervised_at(row, k).sum() for k in range(section.ttt_steps)]).float()


def _stacked(sums: StepSums) -> Tensor:
    return torch.stack([sums.loss.detach(), sums.count, sums.agreed])
