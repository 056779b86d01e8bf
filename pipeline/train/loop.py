"""The training loop: one process or several, the same losses either way."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from pipeline.config import TrainSection
from pipeline.errors import InputError, Stopped
from pipeline.stop import NUMBERS, StopSignals
from pipeline.train.checkpoint import Progress
from pipeline.train.data import Row, Rows, without_data
from pipeline.train.draft import Draft
from pipeline.train.finite import ADVICE, is_finite, listed, suspects
from pipeline.train.loader import RowsAhead
from pipeline.train.loss import StepSums, TargetHead, compile_now, compile_step, supervised_at, unroll
from pipeline.train.optimizer import make_optimizer
from pipeline.train.sharding import distributed, exchange, full, gathered_weights

VALIDATION_AHEAD = 2
"""Rows that are read ahead for a validation, while those of the training wait in memory."""
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


@dataclass(frozen=True)
class Told:
    """What all processes know alike after a step."""

    tokens: int
    """Of all processes' rows."""
    whole: bool
    """Whether all states that were read are finite."""
    signal: int = 0
    """The one that any of them got; 0: none."""
    time_is_due: bool = False
    """For a checkpoint, by train.checkpoint_minutes."""
    skipped: bool = False


class Unrolled(torch.nn.Module):
    """The draft with its loss as one module: what DistributedDataParallel and FSDP need to see."""

    def __init__(self, draft: Draft, target: TargetHead, section: TrainSection, place: Place):
        super().__init__()
        self.draft = draft
        self._target = [target]  # in a list: not a part of the module
        self.section, self.device_type = section, place.device.type

    def forward(
        self, row: Row, noise: Tensor | None, exact: bool, scale_K: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What to go backward from, and sums [3, K] of loss, count and agreed. FSDP finds tensors in tuples only."""
        steps = self.section.ttt_steps
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.section.autocast):
            sums = unroll(self.draft, self._target[0], row, steps, noise, exact=exact, scale_K=scale_K)
        return sums.total, _stacked(sums)


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
        *,
        sharded: bool = False,
    ):
        self.draft, self.section, self.place, self.seed = draft, section, place, seed
        self.train_rows, self.validation_rows = train_rows, validation_rows
        draft.lm_head.weight.requires_grad_(section.train_lm_head)
        self.target = target
        self.module = Unrolled(draft, target, section, place)
        self.parallel = distributed(self.module, place.world, place.device, sharded=sharded)
        self.optimizer = make_optimizer(draft, section, place.rank, 1 if sharded else place.world)
        self.total_steps = sum(train_rows.steps_in(epoch) for epoch in range(section.epochs))
        self.compiled_again = 0
        """Graphs made after `compile`: none is expected, each takes a minute of a step."""
        self._graphs: int | None = None
        self.saved_s = time.monotonic()
        """When the last checkpoint was begun, or the run."""
        self.weights_K = section.ttt_decay ** torch.arange(section.ttt_steps, device=place.device)
        self._copies = torch.cuda.Stream(place.device) if place.device.type == "cuda" else None

    def compile(self, backend: str = "inductor") -> float:
        """Compile what a step and a validation compute, now and for rows of any content. Returns the seconds it took.

        Not at the first rows: all processes do it at the same time, and a signal need not wait for it."""
        begun, room = time.monotonic(), self.train_rows.room()
        compile_step(self.draft, self.target, backend)
        row = without_data(room, [(0, len(room.tokens_R))]).to(self.place.device)

        def compute() -> None:
            total, _ = self.module(row, self._noise(row, 0, 0), False, self.weights_K)
            total.backward()
            if self.validation_rows is not None:
                with torch.no_grad():
                    self.module(row, None, True)

        with gathered_weights(self.module), exchange(self.module, now=True):
            compile_now(self.draft, compute)
        self.optimizer.zero_grad(set_to_none=True)
        self._graphs = _graphs_made()
        return time.monotonic() - begun

    def run(
        self,
        progress: Progress,
        save: Callable[[Progress], None],
        report: ReportFunction,
        stop: StopSignals | None = None,
    ) -> None:
        """Go on from `progress` to the last step. `save` is called, by all processes, where a checkpoint is due.

        Raises Stopped after a signal that any of the processes got: when the step in hand is done and `save` was
        called. Raises InputError for numbers that are not finite, as train.on_nonfinite says.
        """
        stop = stop or StopSignals("")  # one that hears nothing
        steps = list(self._remaining(progress))
        unvalidated = self.validation_rows is not None and progress.step > 0 and not progress.metrics
        with stop.in_hand():
            self._stop_if_told(stop)
            if steps:
                self._settle()
            if unvalidated and self._checkpoint_due(progress.step, progress.step_in_epoch == 0):
                self._validate_and_save(progress, save, report, stop)  # a signal came where this was due
            progress.metrics, self.saved_s = {}, time.monotonic()
            with self._ahead(self.train_rows, steps, self.section.prefetch_rows) as rows:
                for epoch, step in steps:
                    told = self._one(epoch, step, progress, rows, report, stop)
                    if told.signal and progress.step < self.total_steps:
                        save(progress)
                        raise Stopped(told.signal)
                    if told.time_is_due or self._checkpoint_due(progress.step, progress.step_in_epoch == 0):
                        self._validate_and_save(progress, save, report, stop)
        if progress.skipped and progress.skipped == progress.step:
            raise InputError(f"train: all {progress.step:,} steps were skipped: none had finite numbers. {ADVICE}")

    def _settle(self) -> None:
        """DistributedDataParallel orders its buckets anew after its first backward pass. More than two processes add up
        each bucket in an order of its own: this is done before the first step, so that a resumed run's is like any."""
        if not isinstance(self.parallel, DistributedDataParallel):
            return
        row = self.train_rows.load([]).to(self.place.device)
        for _ in range(2):
            total, _ = self.parallel(row, self._noise(row, 0, 0), False, self.weights_K)
            total.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _validate_and_save(
        self, progress: Progress, save: Callable[[Progress], None], report: ReportFunction, stop: StopSignals
    ) -> None:
        """After a signal the validation, which may take minutes, is left to the run that goes on."""
        try:
            progress.metrics = self.validate(stop)
        except Stopped:
            save(progress)
            raise
        report("validation", progress.metrics, progress)
        save(progress)
        progress.metrics, self.saved_s = {}, time.monotonic()

    def _one(
        self, epoch: int, step: int, progress: Progress, rows: RowsAhead, report: ReportFunction, stop: StopSignals
    ) -> "Told":
        """One step, with what is counted and shown of it."""
        learning_rate = self._set_learning_rate(progress.step)
        waited_s, begun = rows.waited_s, time.monotonic()
        metrics, told = self._step(epoch, step, progress.step, rows, stop)
        last_of_epoch = step + 1 == self.train_rows.steps_in(epoch)
        progress.step += 1
        progress.skipped += told.skipped
        progress.epoch, progress.step_in_epoch = (epoch + 1, 0) if last_of_epoch else (epoch, step + 1)
        progress.tokens += told.tokens
        progress.seconds += time.monotonic() - begun
        counted = {"learning_rate": learning_rate, "waited_s": rows.waited_s - waited_s}
        if self.section.on_nonfinite == "skip":
            counted["skipped_steps"] = progress.skipped
        report("train", {**metrics, **counted}, progress)
        self._count_graphs(progress.step)
        return told

    def _count_graphs(self, step: int) -> None:
        if self._graphs is None or (made := _graphs_made() - self._graphs) == 0:
            return
        self.compiled_again += made
        self._graphs += made
        if self.place.first:
            tqdm.write(
                f"train  step {step:,} was compiled again, which should not be: please report it", file=sys.stderr
            )

    @torch.no_grad()
    def validate(self, stop: StopSignals | None = None) -> dict[str, float]:
        """Loss and simulated acceptance on the validation rows, exact against the target's own choice.

        A row that is not finite is an error, or left out and told, as train.on_nonfinite says. Raises Stopped, in all
        processes at the same row, when one of them got a signal.
        """
        if self.validation_rows is None:
            return {}
        rows, place = self.validation_rows, self.place
        steps = [(0, step) for step in range(rows.steps_in(0))]
        indices = [row for _, step in steps for row in rows.of_step(0, step, place.rank, place.world)]
        sums_3K = torch.zeros(3, self.section.ttt_steps, device=place.device)
        bad: tuple[list[str], ...] = ([], [], [])
        ahead_of = min(self.section.prefetch_rows, VALIDATION_AHEAD)
        with self._ahead(rows, steps, ahead_of) as ahead, gathered_weights(self.module):
            for samples, row in zip(indices, ahead, strict=True):
                self._stop_if_told(stop)
                _, sums = self.module(row, None, True)
                if float((is_finite(row) & sums.isfinite().all()).float()) == 1.0:
                    sums_3K += sums
                else:
                    new = suspects(rows, [samples], [row], [sums])
                    bad = tuple(old + more for old, more in zip(bad, new, strict=True))
                ahead.give_back(row)
        if names := self._first_of_all(bad):
            self._refuse_or_say(f"numbers that are not finite in the validation: {listed(names)}", "left out")
        return self._metrics(self._over_processes(sums_3K))

    def _ahead(self, rows: Rows, steps: list[tuple[int, int]], ahead: int) -> RowsAhead:
        """This process's rows of the steps, in their order."""
        place = self.place
        order = (row for epoch, step in steps for row in rows.of_step(epoch, step, place.rank, place.world))
        return RowsAhead(rows, order, ahead, place.device, self._copies)

    def _remaining(self, progress: Progress) -> Iterator[tuple[int, int]]:
        for epoch in range(progress.epoch, self.section.epochs):
            first = progress.step_in_epoch if epoch == progress.epoch else 0
            for step in range(first, self.train_rows.steps_in(epoch)):
                yield epoch, step

    def _checkpoint_due(self, step: int, last_of_epoch: bool) -> bool:
        every = self.section.checkpoint_steps
        return step == self.total_steps or (last_of_epoch if every is None else step % every == 0)

    def _step(
        self, epoch: int, step: int, number: int, ahead: RowsAhead, stop: StopSignals
    ) -> "tuple[dict[str, float], Told]":
        """One optimiser step. Loss and gradient are means over the supervised tokens of *all* processes' rows.

        A loss, gradient or state that is not finite leaves weights and optimiser as they were: an error, or skipped.
        """
        indices = self.train_rows.of_step(epoch, step, self.place.rank, self.place.world)
        rows = [next(ahead) for _ in indices]
        count_K = self._over_processes(torch.stack([_supervised_counts(row, self.section) for row in rows]).sum(0))
        # gradients become the mean over processes, the loss is a sum over them
        scale_K = self.weights_K * self.place.world / count_K.clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        each: list[Tensor] = []
        with gathered_weights(self.parallel):
            for i, row in enumerate(rows):
                with exchange(self.parallel, now=i + 1 == len(rows)):
                    total, sums_3K = self.parallel(row, self._noise(row, number, i), False, scale_K)
                    total.backward()
                each.append(sums_3K)
        norm = full(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.section.clip_norm))
        lengths_N = self.train_rows.reader.lengths_N
        tokens = sum(int(lengths_N[i]) for row in indices for i in row)
        whole = torch.stack([is_finite(row) for row in rows]).all()
        sums_3K, told = self._agreed(torch.stack(each).sum(0), tokens, whole, stop)
        metrics = self._metrics(sums_3K) | {"gradient_norm": float(norm)}
        if told.whole and math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]):
            self.optimizer.step()
            ahead.give_back(*rows)
            return metrics, told
        names = self._first_of_all(suspects(self.train_rows, indices, rows, each))
        what = f"loss {metrics['loss']:.4g}, gradient norm {metrics['gradient_norm']:.4g}" if told.whole else "states"
        what = f"{what} not finite at step {number + 1}: {listed(names)}"
        self._refuse_or_say(what, "step skipped, weights as they were")
        return {}, replace(told, skipped=True)

    def _refuse_or_say(self, what: str, done: str) -> None:
        if self.section.on_nonfinite == "stop":
            raise InputError(f"train: {what}. {ADVICE}")
        if self.place.first:
            tqdm.write(f"train  {what}; {done}", file=sys.stderr)

    def _agreed(self, sums_3K: Tensor, tokens: int, whole: Tensor, stop: StopSignals) -> "tuple[Tensor, Told]":
        """What all processes must know alike, in one exchange: sums, tokens, whether to stop or save."""
        every_s = math.inf if self.section.checkpoint_minutes is None else 60 * self.section.checkpoint_minutes
        due = self.place.first and time.monotonic() - self.saved_s >= every_s
        if self.place.world == 1:
            return sums_3K, Told(tokens, float(whole.float()) == 1.0, stop.received, due)
        own = torch.tensor([tokens, due, *(stop.received == number for number in NUMBERS)], dtype=torch.float64)
        flat = torch.cat([sums_3K.double().flatten(), whole.double()[None], own.to(sums_3K.device)])
        dist.all_reduce(flat)
        *_, finite, tokens_in_all, time_is_due, sigint, sigterm = flat.tolist()
        number = NUMBERS[1] if sigterm else NUMBERS[0] if sigint else 0
        told = Told(int(tokens_in_all), finite == self.place.world, number, bool(time_is_due))
        return flat[: sums_3K.numel()].view(sums_3K.shape), told

    def _stop_if_told(self, stop: StopSignals | None) -> None:
        number = stop.received if stop else 0
        if self.place.world > 1:
            told = torch.tensor([number], device=self.place.device)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            number = int(told)
        if number:
            raise Stopped(number)

    def _first_of_all(self, lists: tuple[list[str], ...]) -> list[str]:
        """The first of the lists that is not empty, those of all processes put together."""
        parts = [lists]
        if self.place.world > 1:
            parts = [lists for _ in range(self.place.world)]
            dist.all_gather_object(parts, lists)
        together = [[name for part in level for name in part] for level in zip(*parts, strict=True)]
        return next((names for names in together if names), [])

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


def _graphs_made() -> int:
    """By torch.compile in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _supervised_counts(row: Row, section: TrainSection) -> Tensor:
    return torch.stack([supervised_at(row, k).sum() for k in range(section.ttt_steps)]).float()


def _stacked(sums: StepSums) -> Tensor:
    return torch.stack([sums.loss.detach(), sums.count, sums.agreed])
