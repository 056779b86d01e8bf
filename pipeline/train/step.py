"""The step itself: checks, set-up of processes and model, the loop, the manifest."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Run
from pipeline.errors import ConfigError, InputError, Stopped, UserError
from pipeline.forecast.training import fits, training_memory
from pipeline.progress import clock
from pipeline.stop import StopSignals
from pipeline.store import Shard, claim, exclusive, finish, release, require_space, writing
from pipeline.store.states import StatesReader
from pipeline.target import Target
from pipeline.train.checkpoint import Keeper, Progress, newest, restore, snapshot_bytes, trainer_tensors
from pipeline.train.data import Rows, split_by_conversation
from pipeline.train.draft import Draft, draft_config
from pipeline.train.init_from import begin_from, fingerprint
from pipeline.train.launch import NOTICE
from pipeline.train.loop import Place, Trainer
from pipeline.train.loss import TargetHead, frozen_dtype
from pipeline.train.machines import TIMEOUT, refuse_unequal
from pipeline.train.optimizer import moments_bytes
from pipeline.train.randomness import gathered, seed_all
from pipeline.train.report import Reporter
from pipeline.train.sharding import is_sharded
from pipeline.vocab import load_map

FORMAT = 3
"""Raised when equal inputs no longer give equal bytes."""
MAY_CHANGE = {
    "tracker", "progress_json", "processes", "sharding", "threads", "prefetch_rows", "keep_checkpoints",
    "checkpoint_minutes", "on_full_disk", "on_nonfinite", "init_from", "init_from_unequal",
}  # fmt: skip
"""Keys that a run may go on with another value of. A run that stopped at numbers that are not finite may skip them from
there on; of the draft that it began from the content counts, not the place."""


def run(config: Run) -> None:
    """Train the draft of a run, or go on with it, or say that it is done.

    Raises MismatchError for checkpoints of other settings, InputError for unfinished predecessors.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(NOTICE, alone=int(os.environ.get("WORLD_SIZE", "1")) == 1))
        place = stack.enter_context(_processes(config.train.threads))
        folder = config.folder("checkpoints")
        target, reader = Target(config.target), StatesReader(config.folder("hidden"))
        maps = load_map(config.folder("vocab"))
        inputs, done = _inputs(config, reader), None
        stack.enter_context(writing(folder, "train"))
        start = newest(folder)
        refuse_unequal(place.world, inputs, start.name if start else None)
        if place.first:
            stack.enter_context(exclusive(folder, "train"))
            done = claim(folder, "train", inputs)
            if done:
                print(f"train  already done: {folder / 'best'}, acceptance length {_shown(done.totals)} on validation")
        finished = _from_first(place, place.first and done is not None)
        if finished:
            return
        try:
            totals = _train(config, place, target, reader, maps, folder, stop)
        except (UserError, OSError):
            if place.first and newest(folder) is None:
                release(folder)  # settings that did not work claim no folder
            raise
        if place.first:
            finish(folder, "train", inputs, _files(folder), totals)
            print(
                f"train  {folder / 'best'}: acceptance length {_shown(totals)} on {totals['validation_samples']:,} "
                f"validation samples, {totals['steps']:,} steps, {totals['tokens_per_second']:,.0f} tok/s"
            )
        _from_first(place, True)  # the others wait: torchrun ends 5 minutes after the first machine is done


def _train(
    config: Run,
    place: Place,
    target: Target,
    reader: StatesReader,
    maps: tuple[Tensor, Tensor],
    folder: Path,
    stop: StopSignals,
) -> dict[str, Any]:
    section, (d2t_D, t2d_V) = config.train, maps
    if place.first and section.rows_per_step % place.world:
        print(
            f"train  rows_per_step {section.rows_per_step} is no multiple of the {place.world} processes: "
            "in each step some compute an empty row",
            file=sys.stderr,
        )
    sharded = is_sharded(section.sharding, place.world, lambda: _replica_fits(config, target, place))
    if place.first and sharded:
        print(f"train  weights, gradients and moments are sharded over {place.world} processes", file=sys.stderr)
    train, validation = split_by_conversation(reader.conversation_ids, section.validation_share, config.seed)
    _refuse_nothing_to_learn(reader, train)
    if validation and not reader.num_supervised_N[validation].any():
        validation = []
        if place.first:
            print(
                "train  no token of the validation samples is supervised: the last checkpoint is best", file=sys.stderr
            )
    head, dtype = target.head(), frozen_dtype(target.dtype, section.autocast)
    kept_D = d2t_D + torch.arange(len(d2t_D))
    own = draft_config(target, section, reader.manifest.totals["aux_layers"], len(d2t_D))
    draft = Draft(own, head.embedding_VH.to(dtype))
    draft.initialise(config.seed, head.norm_H, head.lm_head_VH[kept_D])
    if section.init_from and newest(folder) is None:
        said = begin_from(draft, section.init_from, kept_D, target.aux_layers(None), section.init_from_unequal)
        if place.first:
            print("\n".join(said), file=sys.stderr)
    draft.to(place.device)
    size = sum(parameter.numel() for parameter in draft.parameters())

    def rows(samples: list[int]) -> Rows:
        return Rows(reader, samples, section.tokens_per_row, config.seed, section.rows_per_step)

    head_of_target = TargetHead(head, kept_D, place.device, dtype)
    trainer = Trainer(
        draft,
        head_of_target,
        rows(train),
        rows(validation) if validation else None,
        section,
        place,
        config.seed,
        sharded=sharded,
    )
    if place.first:
        one = snapshot_bytes(size, moments_bytes(trainer.optimizer), target.dtype)
        require_space(folder, one * (section.keep_checkpoints + 2), "train")
    seed_all(config.seed, place.rank)
    start = newest(folder)
    progress = restore(start, draft, trainer.optimizer, place.rank) if start else Progress()
    full_vocabulary = len(d2t_D) == len(t2d_V)  # vLLM refuses a mapping where there is nothing to map
    keeper = Keeper(
        folder,
        {} if full_vocabulary else {"d2t": d2t_D, "t2d": t2d_V},
        section.keep_checkpoints,
        validated=bool(validation),
        on_full_disk=section.on_full_disk,
    )

    def save(now: Progress) -> None:
        generators = gathered(place.world)
        if place.first:
            keeper(draft, trainer.optimizer, now, generators)
        else:
            for _ in trainer_tensors(draft, trainer.optimizer):
                pass  # what is sharded or shared out is gathered by all

    def report_and_check(kind: str, metrics: dict[str, float], now: Progress) -> None:
        report(kind, metrics, now)
        keeper.check()

    if place.first:
        keeper.tidy()
    reporter = Reporter(config, folder, trainer.total_steps, progress, enabled=place.first)
    with reporter as report, keeper:
        keeper.saved = report.saved
        report.begin(len(train), len(validation), size)
        if place.device.type == "cuda" and progress.step < trainer.total_steps:
            report.say("train  compiling for this GPU ...")
            report.say(f"train  compiled in {clock(trainer.compile())}")
        with stop.in_hand():  # until all is written, too
            try:
                trainer.run(progress, save, report_and_check, stop)
                keeper.wait(last=True)
            except Stopped:
                keeper.wait()
                raise
    return {
        "acceptance_length": keeper.best_value() if place.first and validation else None,
        "steps": progress.step,
        "tokens_per_second": progress.tokens / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
        "skipped_steps": progress.skipped,
        "compiled_again": trainer.compiled_again,
        "train_samples": len(train),
        "validation_samples": len(validation),
        "parameters": size,
    }


def _replica_fits(config: Run, target: Target, place: Place) -> bool:
    """Whether it fits the smallest of the processes' GPUs, by the forecast. A CPU's memory is not looked at."""
    if place.device.type == "cpu":
        return True
    size_bytes = torch.cuda.get_device_properties(place.device).total_memory
    own = fits(training_memory(config, target, place.world), config, size_bytes)
    in_all = torch.tensor(int(own), device=place.device)
    dist.all_reduce(in_all, dist.ReduceOp.MIN)
    return bool(in_all)


def _inputs(config: Run, reader: StatesReader) -> dict[str, Any]:
    from pipeline.store import read_manifest

    section = config.train.model_dump(mode="json", exclude=MAY_CHANGE)
    # one key, and none for AdamW: a run from before there was a choice may go on
    kind, decay = section.pop("optimizer"), section.pop("muon_weight_decay")
    muon = {"optimizer": f"{kind} of weight decay {decay}"} if kind == "muon" else {}
    vocab = read_manifest(config.folder("vocab"), "vocab")
    begun = {"init_from": fingerprint(config.train.init_from)} if config.train.init_from else {}
    return {
        "format": FORMAT,
        "hidden": reader.manifest.run_key,
        "vocab": vocab.run_key,
        "seed": config.seed,
        "dtype": config.target.dtype,
        **section,
        **muon,
        **begun,
    }


def _refuse_nothing_to_learn(reader: StatesReader, train: list[int]) -> None:
    if not train:
        raise InputError("train: all samples went to validation. Prepare more conversations")
    if not reader.num_supervised_N[train].any():
        raise InputError("train: no token of the training samples is supervised. Look at prepared/rejected.jsonl")


class _processes:  # noqa: N801 (used as a function)
    """This process's place among those of torchrun or pipeline.train.launch, and its device.

    The process group ends with the block, but not at an error: another process may be waiting in a collective
    operation, and closing the group could then wait for that one. The process ends, and its connections with it.
    """

    def __init__(self, threads: int | None):
        self.threads = threads
        self.made_group = False  # there may be one that is not ours: an engine's that ran in this process

    def __enter__(self) -> Place:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        if cuda and local >= torch.cuda.device_count():
            raise ConfigError(
                f"train: process {local} of this machine has no GPU: there are {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
            torch.set_num_threads(self.threads or 1)  # those that read rows decode them, each by itself
        else:
            torch.set_num_threads(self.threads or max(1, len(os.sched_getaffinity(0)) // local_world))
        if world > 1:
            dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=device if cuda else None)
            self.made_group = True
        return Place(rank, world, device)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.made_group and (error is None or issubclass(error, Stopped)):  # all stop at the same step
            dist.destroy_process_group()


def _from_first(place: Place, value: bool) -> bool:
    if place.world == 1:
        return value
    shared = torch.tensor([int(value)], device=place.device)
    dist.broadcast(shared, 0)
    return bool(shared.item())


def _files(folder: Path) -> list[Shard]:
    checkpoint = (folder / "best").resolve()
    return [
        Shard(f"{checkpoint.name}/{path.name}", **_measured(path))
        for path in sorted(checkpoint.iterdir())
        if path.is_file()
    ]


def _measured(path: Path) -> dict[str, Any]:
    shard = Shard.describe(path, 0, 0)
    return {"samples": 0, "tokens": 0, "size_bytes": shard.size_bytes, "sha256": shard.sha256}


def _shown(totals: dict[str, Any]) -> str:
    value = totals["acceptance_length"]
    return "unknown" if value is None else f"{value:.2f}"
