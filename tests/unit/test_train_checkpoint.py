"""Which checkpoint is the best, which are kept, and the learning rate over time."""

import errno
from pathlib import Path

import pytest
import torch

from pipeline.config import TrainSection
from pipeline.errors import InputError
from pipeline.train import checkpoint
from pipeline.train.checkpoint import Keeper, Progress, newest, restore
from pipeline.train.loop import schedule
from pipeline.train.randomness import random_state

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Draft(torch.nn.Module):
    """As much of a draft as a checkpoint sees."""

    class Config:
        dtype = "bfloat16"

        def to_json_string(self, use_diff: bool) -> str:
            return "{}"

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


@pytest.fixture
def draft() -> Draft:
    return Draft()


@pytest.fixture
def optimizer(draft: Draft) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.1)
    draft.fc(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def test_best_is_the_one_accepted_most_and_the_newest_are_kept(tmp_path: Path, draft, optimizer):
    keeper = Keeper(tmp_path, {}, keep=2)
    for step, length in enumerate([1.2, 1.5, 1.4, 1.3, 1.45], 1):
        keeper(draft, optimizer, Progress(step=step, metrics={"acceptance_length": length}))
    keeper.wait()
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in (2, 4, 5)]
    assert keeper.best_value() == 1.5
    assert Keeper(tmp_path, {}, 2).best_value() == 1.5, "a resumed run knows it"


def test_without_validation_the_newest_is_the_best(tmp_path: Path, draft, optimizer):
    keeper = Keeper(tmp_path, {}, keep=1)
    for step in (1, 2):
        keeper(draft, optimizer, Progress(step=step))
    keeper.wait()
    assert (tmp_path / "best").resolve().name == "step-00000002"


def test_what_a_killed_process_left_is_put_in_order(tmp_path: Path, draft, optimizer):
    """It was killed after a checkpoint was there and before anything pointed to it, or in the middle of one."""
    keeper = Keeper(tmp_path, {}, keep=9, validated=True)
    for step, length in enumerate([1.2, 1.5, 1.5, 1.3], 1):
        keeper(draft, optimizer, Progress(step=step, metrics={"acceptance_length": length}))
    keeper(draft, optimizer, Progress(step=5))
    keeper.wait()
    for name in ("best", "last"):
        (tmp_path / name).unlink()
    (tmp_path / ".step-00000006.tmp" / "trainer").mkdir(parents=True)
    (tmp_path / "step-00000001" / "trainer" / "progress.json").write_text("{")
    keeper.tidy()
    assert (tmp_path / "best").resolve().name == "step-00000003"
    assert (tmp_path / "last").resolve().name == "step-00000005"
    assert not list(tmp_path.glob(".step-*"))


def test_a_checkpoint_that_is_there_gets_its_validation_and_is_not_written_again(tmp_path: Path, draft, optimizer):
    """A kill while it is put in another one's place would lose the newest checkpoint."""
    keeper = Keeper(tmp_path, {}, keep=2, validated=True)
    keeper(draft, optimizer, Progress(step=3))
    keeper.wait()
    state = tmp_path / "step-00000003/trainer/state.safetensors"
    inode = state.stat().st_ino
    keeper(draft, optimizer, Progress(step=3, metrics={"acceptance_length": 1.5}))
    keeper.wait()
    assert state.stat().st_ino == inode
    assert keeper.best_value() == 1.5


def test_without_its_last_checkpoint_a_run_is_not_done(tmp_path: Path, draft, optimizer, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    keeper = Keeper(tmp_path, {}, 1, on_full_disk="continue")
    keeper(draft, optimizer, Progress(step=1))
    keeper.wait()
    assert "no room for a checkpoint" in capsys.readouterr().err
    with pytest.raises(OSError, match="No space left"), keeper:
        keeper(draft, optimizer, Progress(step=2))


def test_generators_and_skipped_steps_come_back(tmp_path: Path):
    """Nothing in training draws from them today: what a library draws must not make a resumed run another one."""
    draft = Draft()
    untouched = torch.optim.AdamW(draft.parameters(), lr=0.1)
    with Keeper(tmp_path, {}, 1) as keeper:
        keeper(draft, untouched, Progress(step=1, skipped=1), [random_state()])
    drawn = torch.rand(3)
    assert restore(newest(tmp_path), draft, untouched).skipped == 1
    assert torch.equal(torch.rand(3), drawn)
    assert not untouched.state
    with Keeper(tmp_path, {}, 1) as keeper:
        keeper(draft, untouched, Progress(step=2))
    with pytest.raises(InputError, match="cannot be resumed"):
        restore(newest(tmp_path), draft, untouched)


def test_vllm_finds_only_the_draft_in_a_checkpoint(tmp_path: Path, draft, optimizer):
    """vLLM loads every safetensors file of a folder; the trainer's state among them stops it."""
    with Keeper(tmp_path, {"d2t": torch.zeros(2, dtype=torch.long)}, 1) as keeper:
        keeper(draft, optimizer, Progress(step=1))
    assert [path.name for path in (tmp_path / "best").glob("*.safetensors")] == ["model.safetensors"]


def test_optimiser_state_comes_back_in_float32(tmp_path: Path, draft, optimizer):
    """0.3.0 cast it to bfloat16, its step counter too."""
    with Keeper(tmp_path, {}, 1) as keeper:
        keeper(draft, optimizer, Progress(step=7, epoch=1, step_in_epoch=3, tokens=11))
    other = Draft()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    progress = restore(newest(tmp_path), other, fresh)
    assert (progress.step, progress.epoch, progress.step_in_epoch, progress.tokens) == (7, 1, 3, 11)
    for (name, one), two in zip(draft.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, fresh.state[two][key]), key
            assert fresh.state[two][key].dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_restored_optimiser_goes_on_as_the_one_that_was_saved(tmp_path: Path, device):
    """On a GPU the fused AdamW refuses a step counter that was left on the CPU."""
    drafts = [Draft().to(device) for _ in range(2)]
    optimizers = [torch.optim.AdamW(draft.parameters(), lr=0.1, fused=True) for draft in drafts]
    step(drafts[0], optimizers[0])
    with Keeper(tmp_path, {}, 1) as keeper:
        keeper(drafts[0], optimizers[0], Progress(step=1))
    restore(newest(tmp_path), drafts[1], optimizers[1])
    for draft, optimizer in zip(drafts, optimizers, strict=True):
        step(draft, optimizer)
    for one, two in zip(*(draft.parameters() for draft in drafts), strict=True):
        assert torch.equal(one, two)


def step(draft: Draft, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    draft.fc(torch.ones(2, device=draft.fc.weight.device)).square().sum().backward()
    optimizer.step()


def test_a_torn_checkpoint_is_named(tmp_path: Path, draft, optimizer):
    with Keeper(tmp_path, {}, 1) as keeper:
        keeper(draft, optimizer, Progress(step=1))
    state = tmp_path / "step-00000001" / "trainer" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-5])
    with pytest.raises(InputError, match="step-00000001 cannot be resumed"):
        restore(newest(tmp_path), draft, optimizer)


def test_learning_rate_rises_and_falls_to_its_share():
    section = TrainSection(warmup_ratio=0.1, min_learning_rate_ratio=0.05)
    rates = [schedule(step, 100, section) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0 == max(rates)
    assert rates[-1] == pytest.approx(0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert schedule(0, 1, section) == 1.0, "a run of one step"
