"""Sharded training on two GPUs against replicas: the same losses, less memory (as forecast), nothing compiled again."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.config import Run
from pipeline.forecast.training import FullRows, sharded_memory, training_memory
from pipeline.target import Head, Target
from pipeline.train.checkpoint import Progress
from pipeline.train.data import Row
from pipeline.train.draft import Draft, draft_config
from pipeline.train.launch import launch
from pipeline.train.loop import Place, Trainer
from pipeline.train.loss import TargetHead, frozen_dtype
from tests.gpu.test_forecast_memory import LLAMA, TOLERANCE, RandomRows

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs: they exchange weights by NCCL"),
    pytest.mark.filterwarnings("default"),  # of whatever versions that machine has
]
STEPS = 6
TRAIN = {"tracker": "none", "epochs": 1, "checkpoint_steps": 2, "rows_per_step": 4, "tokens_per_row": 2048}


class Rows(RandomRows):
    """For more steps: what is compiled again would be so in the third or later."""

    def steps_in(self, epoch: int) -> int:
        return STEPS

    def load(self, row: list[int], room: Row | None = None) -> Row:
        return super().load(row, room) if row else FullRows.load(self, row, room)  # replicas alone take an empty one


def run_of(folder: str) -> tuple[Run, Target]:
    sections = {
        "name": "gpu",
        "target": {"path": folder, "max_length": 512},
        "prepare": {"sources": ["none"]},
        "vocab": {"draft_vocab_size": 32000},
        "train": TRAIN,
    }
    config = Run.model_validate(sections)
    return config, Target(config.target)


def train_both(folder: str) -> None:
    """What each process does. `RANK.json` holds losses, bytes at the peak and graphs, of replicas and sharded."""
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place(rank, world, torch.device("cuda", rank))
    torch.cuda.set_device(place.device)
    dist.init_process_group("nccl", device_id=place.device)
    facts = [trained(*run_of(folder), place, sharded=sharded) for sharded in (False, True)]
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def trained(config: Run, target: Target, place: Place, *, sharded: bool) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    graphs: list[int] = []

    def report(kind: str, metrics: dict[str, float], _: Progress) -> None:
        losses.append(metrics["loss"])
        graphs.append(counters["stats"]["unique_graphs"])

    trainer = make_trainer(config, target, place, sharded)
    trainer.compile()
    trainer.run(Progress(), lambda _: None, report)
    return {"losses": losses, "graphs": graphs, "peak": torch.cuda.max_memory_allocated()}


def make_trainer(config: Run, target: Target, place: Place, sharded: bool) -> Trainer:
    section, shape = config.train, (target.vocab_size, target.hidden_size)
    torch.manual_seed(0)  # weights are the same in all processes, rows are not
    with place.device:
        dtype, words = frozen_dtype(target.dtype, section.autocast), config.vocab.draft_vocab_size
        embedding, output = (torch.empty(shape, dtype=dtype).normal_(0, std) for std in (1, 0.02))
        head = Head(embedding, torch.ones(shape[1]), output, 1e-5)
        draft = Draft(draft_config(target, section, target.aux_layers(None), words), head.embedding_VH)
        teacher = TargetHead(head, torch.arange(words), place.device, dtype)
    torch.manual_seed(1 + place.rank)
    each = section.rows_per_step // place.world
    rows: Any = Rows(each, section.tokens_per_row, config.target.max_length, target.hidden_size, target.dtype)
    rows.words = target.vocab_size
    section = section.model_copy(update={"prefetch_rows": 0})  # threads would draw the rows in another order
    return Trainer(draft, teacher, rows, rows, section, place, 0, sharded=sharded)


def test_two_gpus_train_sharded_as_with_replicas_in_less_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    launch(2, train_both, str(tmp_path))
    config, target = run_of(str(tmp_path))
    section = config.train.model_copy(update={"prefetch_rows": 0})
    forecast = training_memory(config.model_copy(update={"train": section}), target, 2)
    for rank in (0, 1):
        replica, sharded = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(sharded["losses"]) == STEPS + STEPS // 2, "steps and validations"
        assert sharded["losses"] == pytest.approx(replica["losses"], rel=1e-3)
        print(f"replica {replica['peak']:,} B, forecast {forecast.total:,}; sharded {sharded['peak']:,} B, "
              f"forecast {sharded_memory(forecast, 2).total:,}")  # fmt: skip
        assert sharded["peak"] < replica["peak"] - 0.9 * forecast.optimizer / 2
        assert sharded["peak"] == pytest.approx(sharded_memory(forecast, 2).total, rel=TOLERANCE)
        for facts in (replica, sharded):
            assert len(set(facts["graphs"])) == 1, "compiled again"
        assert sharded["graphs"][-1] == replica["graphs"][-1]
