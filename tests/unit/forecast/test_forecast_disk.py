"""Forecast bytes against files that the steps' own code writes: hidden/ and checkpoints to 1 %."""

from pathlib import Path

import pytest
import torch

from pipeline.config import Run
from pipeline.extract.plan import Limits, plan
from pipeline.forecast import disk
from pipeline.forecast.data import data_of
from pipeline.forecast.training import training_memory
from pipeline.store.samples import read_samples
from pipeline.store.states import write_states
from pipeline.target import Target
from pipeline.train.checkpoint import Keeper, Progress
from tests.forecasting import make_trainer, small_run
from tests.runs import make_samples, write_prepared

LENGTHS = {
    "one token each": [1] * 50,
    "mixed": [1, 128, 7, 1, 1, 90, 128, 64, 2, 33],
    "one longer than a shard": [100, 3, 5],
    "long": [128] * 20,
}


def write_hidden(config: Run, target: Target, dtype: torch.dtype, store_dtype: str | None = None) -> int:
    """hidden/ as pipeline.extract splits and writes it, states of zeros. Returns its bytes."""
    prepared, total = config.folder("prepared"), 0
    samples = read_samples(prepared)
    for planned in plan(prepared, config.extract.shard_tokens, Limits(target.vocab_size, 128)):
        shard = write_states(
            config.runs_dir / planned.file,
            [next(samples) for _ in range(planned.samples)],
            torch.zeros(planned.tokens, 3, target.hidden_size, dtype=dtype),
            torch.zeros(planned.tokens, target.hidden_size, dtype=dtype),
            aux_layers=target.aux_layers(None),
            last_layer=target.num_layers,
            run_key="0" * 32,
            store_dtype=store_dtype,
        )
        total += shard.size_bytes
    return total


@pytest.mark.parametrize("store_dtype", [None, "bf16", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_hidden_states_are_known_to_the_byte_once_samples_are_prepared(tmp_path: Path, lengths, dtype, store_dtype):
    config, target = small_run(tmp_path)
    config = config.model_copy(update={"extract": config.extract.model_copy(update={"shard_tokens": 96})})
    write_prepared(config.folder("prepared"), make_samples(lengths))
    data = data_of(config)
    assert (data.samples, data.tokens) == (len(lengths), sum(lengths))
    written = write_hidden(config, target, getattr(torch, dtype), store_dtype)
    assert disk.hidden_bytes(data, target, config, dtype, store_dtype) == written


def test_hidden_states_are_known_to_a_hundredth_before(tmp_path: Path):
    config, target = small_run(tmp_path)
    section = config.forecast.model_copy(update={"samples": 30, "tokens_per_sample": 70})
    config = config.model_copy(update={"forecast": section})
    forecast = disk.hidden_bytes(data_of(config), target, config, "bfloat16")
    write_prepared(config.folder("prepared"), make_samples([60, 80] * 15))
    assert forecast == pytest.approx(write_hidden(config, target, torch.bfloat16), rel=0.01)


@pytest.mark.parametrize("train", [{}, {"train_lm_head": False}, {"optimizer": "muon"}])
def test_checkpoints_are_known_to_a_hundredth(tmp_path: Path, train):
    config, target = small_run(tmp_path, **train, epochs=1, checkpoint_steps=1, keep_checkpoints=1)
    memory = training_memory(config, target, 1)
    trainer, folder = make_trainer(config, target), tmp_path / "checkpoints"
    folder.mkdir()
    maps = {"d2t": torch.zeros(400, dtype=torch.int64), "t2d": torch.zeros(target.vocab_size, dtype=torch.bool)}
    keeper = Keeper(folder, maps, config.train.keep_checkpoints)
    trainer.run(Progress(), lambda p: keeper(trainer.draft, trainer.optimizer, p), lambda *_: None)
    sizes = {path.name: disk.written_bytes(path) for path in folder.glob("step-*")}
    forecast = disk.checkpoint_bytes(config, target, memory)
    assert sizes
    assert all(size == pytest.approx(forecast, rel=0.01) for size in sizes.values()), (forecast, sizes)


def test_checkpoints_at_once_are_those_kept_the_best_and_the_new_one(tmp_path: Path):
    few, _ = small_run(tmp_path, epochs=2)
    assert disk.checkpoints_held(few, 1000) == 2, "one at the end of each epoch"
    many, _ = small_run(tmp_path, epochs=2, checkpoint_steps=100, keep_checkpoints=3)
    assert disk.checkpoints_held(many, 1000) == 5


def test_folders_of_one_file_system_share_its_room(tmp_path: Path):
    (place,) = disk.places([(tmp_path / "runs/a", 3.0), (tmp_path / "models", 4.0)])
    assert place.left == 7.0
    assert place.folder == tmp_path
