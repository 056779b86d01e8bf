"""Which optimiser changes which weights, and that two of them are one to those that use it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn

from pipeline.errors import InputError
from pipeline.forecast.training import sharded_memory, training_memory
from pipeline.store import write_json
from pipeline.store.tensors import write_tensors
from pipeline.train.checkpoint import Keeper, Progress, newest, restore, trainer_tensors
from pipeline.train.loop import Trainer
from pipeline.train.optimizer import MuonAndAdamW, make_optimizer, shared_out
from tests.forecasting import make_trainer, small_run

TRAIN = {"autocast": False, "ttt_steps": 1}


@pytest.fixture
def new_trainer(tmp_path: Path):
    def make(**train) -> Trainer:
        return make_trainer(*small_run(tmp_path, **TRAIN, **train))

    return make


@pytest.fixture
def trainer(new_trainer) -> Trainer:
    return new_trainer(optimizer="muon", num_layers=2, weight_decay=0.01)


def step(trainer: Trainer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trainer.draft.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    trainer.optimizer.step()


def test_muon_has_the_matrices_inside_the_draft(trainer):
    draft, optimizer = trainer.draft, trainer.optimizer
    assert isinstance(optimizer, MuonAndAdamW)
    of = {name: "muon" if p in optimizer.matrices else "adamw" for name, p in draft.named_parameters()}
    assert of == {name: "adamw" if "norm" in name or "lm_head" in name else "muon" for name in of}
    assert sum(kind == "muon" for kind in of.values()) == 1 + 2 * 7
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(of)
    assert (decay[draft.fc.weight], decay[draft.lm_head.weight], decay[draft.norm.weight]) == (0.1, 0.01, 0.0)


def train_shared(rank: int, folder: Path, processes: int) -> None:
    """What each process does: two steps, a checkpoint by the first, a third step after all have restored it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    own = folder / str(rank)
    own.mkdir()
    trainer, other = (shared_trainer(own, rank, processes) for _ in range(2))
    for seed in range(2):
        step(trainer, seed)
    tensors = dict(trainer_tensors(trainer.draft, trainer.optimizer))
    save_file(tensors, own / "after-two.safetensors")
    if rank == 0:
        write_tensors(folder / "checkpoint/trainer/state.safetensors", tensors)
        write_json(folder / "checkpoint/trainer/progress.json", {"step": 2})
    dist.barrier()
    restore(folder / "checkpoint", other.draft, other.optimizer, rank)
    step(other, 2)
    save_file(dict(trainer_tensors(other.draft, other.optimizer)), own / "after-three.safetensors")
    for name, one in (("trained", trainer), ("restored", other)):
        kept = [n for n, p in one.draft.named_parameters() if "momentum_buffer" in one.optimizer.state.get(p, {})]
        write_json(own / f"{name}.json", kept)
    dist.destroy_process_group()


def shared_trainer(folder: Path, rank: int = 0, replicas: int = 1) -> Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(*small_run(folder, **TRAIN, optimizer="muon", num_layers=2))
    trainer.optimizer = make_optimizer(trainer.draft, trainer.section, rank, replicas)
    return trainer


def test_replicas_share_out_muons_matrices_and_step_as_one(tmp_path):
    processes = 3
    (tmp_path / "checkpoint/trainer").mkdir(parents=True)
    spawn(train_shared, (tmp_path, processes), processes)
    alone = shared_trainer(tmp_path)
    for seed in range(2):
        step(alone, seed)
    after_two = {name: tensor.clone() for name, tensor in trainer_tensors(alone.draft, alone.optimizer)}
    step(alone, 2)
    after_three = dict(trainer_tensors(alone.draft, alone.optimizer))
    for rank in range(processes):
        for name, want in (("after-two", after_two), ("after-three", after_three)):
            got = load_file(tmp_path / f"{rank}/{name}.safetensors")
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) for key in got), (rank, name)
    one = shared_trainer(tmp_path)
    restore(tmp_path / "checkpoint", one.draft, one.optimizer)
    step(one, 2)
    assert all(torch.equal(tensor, after_three[key]) for key, tensor in trainer_tensors(one.draft, one.optimizer))
    for name in ("trained", "restored"):
        kept = [json.loads((tmp_path / f"{rank}/{name}.json").read_text()) for rank in range(processes)]
        assert all(kept)
        assert sorted(part for parts in kept for part in parts) == sorted(
            key.removeprefix("momentum_buffer/") for key in after_two if key.startswith("momentum_buffer/")
        )


def test_the_most_work_goes_first_to_the_one_with_the_least():
    shapes = [(8, 16), (2, 2), (16, 8), (4, 8), (8, 8)]
    assert shared_out([torch.empty(shape) for shape in shapes], 2) == [0, 1, 1, 1, 0]
    assert set(shared_out([torch.empty(4, 4)] * 3, 8)) == {0, 1, 2}


def test_without_it_there_is_adamw_alone(new_trainer):
    assert type(new_trainer().optimizer) is torch.optim.AdamW


def test_frozen_output_rows_are_in_neither(new_trainer):
    trainer = new_trainer(optimizer="muon", train_lm_head=False)
    before = trainer.draft.lm_head.weight.clone()
    step(trainer)
    assert torch.equal(trainer.draft.lm_head.weight, before)
    assert trainer.draft.lm_head.weight not in trainer.optimizer.state


def test_rate_state_hooks_and_gradients_are_those_of_both(trainer):
    optimizer, seen = trainer.optimizer, []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    before = [p.detach().clone() for p in trainer.draft.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(trainer)
    assert all(torch.equal(p, old) for p, old in zip(trainer.draft.parameters(), before, strict=True))
    trainer._set_learning_rate(0)
    step(trainer)
    assert not any(torch.equal(p, old) for p, old in zip(trainer.draft.parameters(), before, strict=True))
    assert seen == [1, 1]
    for parameter in trainer.draft.parameters():
        kept = {"momentum_buffer"} if parameter in optimizer.matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == kept
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in trainer.draft.parameters())


def saved(trainer: Trainer, folder: Path, progress: Progress) -> Path:
    with Keeper(folder, {}, 1) as keeper:
        keeper(trainer.draft, trainer.optimizer, progress)
    path = newest(folder)
    assert path
    return path


def test_restored_it_goes_on_as_the_one_that_was_saved(trainer, new_trainer, tmp_path):
    step(trainer)
    other = new_trainer(optimizer="muon", num_layers=2, weight_decay=0.01)
    restore(saved(trainer, tmp_path / "checkpoints", Progress(step=1)), other.draft, other.optimizer)
    for one in (trainer, other):
        step(one, 1)
    for one, two in zip(trainer.draft.parameters(), other.draft.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize(("saves", "resumes"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_checkpoint_of_the_other_optimiser_is_refused(new_trainer, tmp_path, saves, resumes, skipped):
    trainer, other = new_trainer(optimizer=saves), new_trainer(optimizer=resumes)
    step(trainer)
    path = saved(trainer, tmp_path / "checkpoints", Progress(step=2, skipped=skipped))
    with pytest.raises(InputError, match="cannot be resumed"):
        restore(path, other.draft, other.optimizer)


@pytest.mark.parametrize("skipped", [0, 1])
def test_only_where_all_steps_were_skipped_there_is_nothing_to_restore(trainer, new_trainer, tmp_path, skipped):
    path = saved(trainer, tmp_path / "checkpoints", Progress(step=1, skipped=skipped))
    if not skipped:
        with pytest.raises(InputError, match="cannot be resumed"):
            restore(path, trainer.draft, trainer.optimizer)
        return
    restore(path, trainer.draft, trainer.optimizer)
    assert not trainer.optimizer.state


def test_the_forecast_counts_one_moment_of_muons_weights(tmp_path):
    def memory(processes=1, **train):
        config, target = small_run(tmp_path, **train)
        return training_memory(config, target, processes)

    adamw, muon = memory(), memory(optimizer="muon")
    inside = muon.trainable - muon.output_rows - 4 * 256  # norms
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * inside, rel=0.01)
    assert muon.total < adamw.total

    two = memory(2, optimizer="muon")
    assert two.matrices == inside
    assert two.moments == pytest.approx(muon.optimizer, rel=1e-3)
    assert muon.optimizer - two.optimizer == pytest.approx(4 * inside / 2, rel=0.1)
    assert sharded_memory(two, 2).optimizer == pytest.approx(muon.optimizer / 2, rel=1e-3)
