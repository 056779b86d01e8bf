"""Which optimiser changes which weights, and that two of them are one to those that use it."""

from pathlib import Path

import pytest
import torch

from pipeline.errors import InputError
from pipeline.forecast.training import training_memory
from pipeline.train.checkpoint import Keeper, Progress, newest, restore
from pipeline.train.loop import Trainer
from pipeline.train.optimizer import MuonAndAdamW
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
    def memory(**train):
        config, target = small_run(tmp_path, **train)
        return training_memory(config, target, 1)

    adamw, muon = memory(), memory(optimizer="muon")
    inside = muon.trainable - muon.output_rows - 4 * 256  # norms
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * inside, rel=0.01)
    assert muon.total < adamw.total
