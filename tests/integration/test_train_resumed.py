"""A training that is killed or stopped at any step goes on to the same losses and weights.

The step runs in this process, on states that the target computed for random ids.
"""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.__main__ import run_step
from pipeline.config import Run
from pipeline.store.states import StatesReader
from pipeline.train import checkpoint, loop
from pipeline.train import step as train_step
from pipeline.train.randomness import random_state, seed_all, set_random_state
from tests.runs import CHILD_S
from tests.short_training import curve, folder, make_inputs, make_run, total_steps
from tests.training import Answers


@pytest.fixture(scope="module")
def inputs(llama_folder: Path) -> Answers:
    return make_inputs(llama_folder)


@pytest.fixture
def new_run(tmp_path: Path, llama_folder: Path, inputs: Answers):
    return partial(make_run, tmp_path, llama_folder, inputs)


@pytest.fixture(autouse=True)
def default_signals():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background has it ignored
    yield
    signal.signal(signal.SIGINT, before)


def outcome(config: Run) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    """The curve, and all that the newest checkpoint holds of weights and moments."""
    return curve(config), load_file(folder(config) / "last/trainer/state.safetensors")


def assert_equal(one: Run, two: Run) -> None:
    (curve_1, tensors_1), (curve_2, tensors_2) = outcome(one), outcome(two)
    assert curve_1 == curve_2
    assert tensors_1.keys() == tensors_2.keys()
    for name, tensor in tensors_1.items():
        assert torch.equal(tensor, tensors_2[name]), name
    assert (folder(one) / "best").resolve().name == (folder(two) / "best").resolve().name


class Killed(BaseException):
    """Ends a run as nothing that the step catches does."""


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act) -> None:
    """Have `act()` called when step `number` (from 0) begins."""
    original = loop.Trainer._step

    def step(self, epoch, step, now, *more):
        if now == number:
            act()
        return original(self, epoch, step, now, *more)

    monkeypatch.setattr(loop.Trainer, "_step", step)


def fail(error: BaseException):
    raise error


@pytest.fixture
def undisturbed(new_run) -> Run:
    config = new_run("undisturbed")
    assert run_step("train", config) == 0
    return config


def test_killed_at_random_steps_it_ends_as_if_undisturbed(new_run, undisturbed, monkeypatch):
    """Also in an epoch's midst and between two checkpoints; generators that something draws from go on, too."""
    config, random = new_run("killed"), np.random.default_rng(int(time.time()))
    total = total_steps(undisturbed)
    assert total >= 9
    kills = sorted(random.choice(np.arange(1, total), 4, replace=False).tolist())
    for number in kills:
        with monkeypatch.context() as patch:
            at_step(patch, number, lambda: fail(Killed()))
            with pytest.raises(Killed):
                run_step("train", config)
    assert run_step("train", config) == 0, kills
    assert_equal(config, undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_in_hand_and_the_run_goes_on_from_there(
    new_run, undisturbed, monkeypatch, capfd, number, code
):
    config = new_run("stopped")
    for step in (2, 5):  # an odd one beside checkpoint_steps 2, and one where a checkpoint is due anyway
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: os.kill(os.getpid(), number))
            assert run_step("train", config) == code
        assert (folder(config) / "last").resolve().name == f"step-{step + 1:08d}"
        assert "train: stopped. Run it again: it goes on" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert run_step("train", config) == 0
    assert_equal(config, undisturbed)


def test_muon_goes_on_to_the_same_bits(new_run, monkeypatch, capfd):
    """And only as Muon: its state is not AdamW's."""
    alone, config = (new_run(name, optimizer="muon") for name in ("alone", "stopped"))
    assert run_step("train", alone) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_step("train", config) == 143
    assert (folder(config) / "last").resolve().name == "step-00000003"
    other = config.model_copy(update={"train": config.train.model_copy(update={"optimizer": "adamw"})})
    assert run_step("train", other) == 3
    assert "was made with optimizer muon of weight decay 0.1" in "".join(capfd.readouterr())
    assert run_step("train", config) == 0
    assert_equal(config, alone)
    kept = {name.partition("/")[0] for name in outcome(config)[1] if name.endswith("/fc.weight")}
    assert kept == {"weight", "momentum_buffer"}


def test_a_run_from_before_there_was_muon_goes_on(new_run):
    config = new_run()
    inputs = train_step._inputs(config, StatesReader(config.folder("hidden")))
    assert not {"optimizer", "muon_weight_decay"} & inputs.keys()


def test_a_signal_in_a_validation_leaves_that_to_the_run_that_goes_on(new_run, undisturbed, monkeypatch):
    config, original = new_run("stopped"), loop.Trainer.validate
    for now in (4, 9):  # the last step's, too
        with monkeypatch.context() as patch:

            def validate(self, stop, now=now):
                if self.optimizer.state and next(iter(self.optimizer.state.values()))["step"] == now:
                    os.kill(os.getpid(), signal.SIGTERM)
                return original(self, stop)

            patch.setattr(loop.Trainer, "validate", validate)
            assert run_step("train", config) == 143
        assert (folder(config) / "last").resolve().name == f"step-{now:08d}"
        assert (folder(config) / "best").resolve() != (folder(config) / "last").resolve()
    assert run_step("train", config) == 0
    assert_equal(config, undisturbed)


def test_a_signal_before_the_first_step_ends_it_at_once(new_run, monkeypatch, capfd):
    config = new_run()
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "__init__", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        assert run_step("train", config) == 143
    assert not list(folder(config).glob("step-*"))
    assert capfd.readouterr().err == "train: stopped. Run it again: it goes on\n"


def ended_in_its_third_step(config: Run, act) -> int | None:
    """Exit code of a training that does `act()` there. Not forked: autograd may not run in a fork of this process."""
    child = multiprocessing.get_context("spawn").Process(target=trains_with, args=[act, config.model_dump_json()])
    child.start()
    child.join(CHILD_S)
    child.kill()
    child.join()
    return child.exitcode


def trains_with(act, config: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.stop.EXIT_S", 2.0)
        at_step(patch, 2, act)
        sys.exit(run_step("train", Run.model_validate_json(config)))


def hangs_after_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def gets_two_signals() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_a_stop_that_takes_too_long_is_ended(new_run):
    assert ended_in_its_third_step(new_run(), hangs_after_a_signal) == 143


def test_a_second_signal_ends_the_process_at_once(new_run):
    config = new_run()
    assert ended_in_its_third_step(config, gets_two_signals) == -signal.SIGTERM
    assert not (folder(config) / "step-00000003").exists()


def test_generators_go_on_where_they_were():
    import random

    seed_all(3, 0)
    _ = random.gauss(0, 1), np.random.normal(), torch.randn(1)
    state = random_state()
    drawn = [(random.gauss(0, 1), np.random.normal(), float(torch.randn(1))) for _ in range(3)]
    seed_all(4, 1)
    set_random_state(state)
    assert [(random.gauss(0, 1), np.random.normal(), float(torch.randn(1))) for _ in range(3)] == drawn


# ---- Checkpoints


def test_a_checkpoint_is_due_after_so_many_minutes(new_run):
    config = new_run(checkpoint_steps=1000, checkpoint_minutes=1e-6, keep_checkpoints=100)
    assert run_step("train", config) == 0
    assert len(list(folder(config).glob("step-*"))) == total_steps(config)


def test_training_goes_on_while_a_checkpoint_is_written(new_run, monkeypatch):
    """Which is then of the step at which it was begun, whatever the weights are by now."""
    original, steps, seen = checkpoint.Keeper._write, [], {}
    alone = new_run("alone", validation_share=0.0, keep_checkpoints=100)
    assert run_step("train", alone) == 0
    config = new_run(validation_share=0.0, keep_checkpoints=100)

    def write(self, names, dtype, text, progress, generators):
        if not seen:
            while len(steps) < progress.step + 2:
                time.sleep(0.01)
        seen[progress.step] = len(steps)
        original(self, names, dtype, text, progress, generators)

    monkeypatch.setattr(checkpoint.Keeper, "_write", write)
    original_step = loop.Trainer._step

    def step(self, *arguments):
        steps.append(1)
        return original_step(self, *arguments)

    monkeypatch.setattr(loop.Trainer, "_step", step)
    assert run_step("train", config) == 0
    assert seen[2] > 2
    for path in sorted(folder(alone).glob("step-*")):
        there = load_file(folder(config) / path.name / "trainer/state.safetensors")
        for name, tensor in load_file(path / "trainer/state.safetensors").items():
            assert torch.equal(tensor, there[name]), (path.name, name)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_keeps_the_checkpoints_that_are_there(new_run, undisturbed, monkeypatch, capfd, policy):
    config, original, calls = new_run("full", on_full_disk=policy), checkpoint.write_json, []

    def write_json(path, value):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", write_json)
        code = run_step("train", config)
    said = capfd.readouterr().err
    if policy == "stop":
        assert code == 5
        assert said.count("no room left on the disk") == 1
        assert [path.name for path in folder(config).glob("step-*")] == ["step-00000002"]
        assert not list(folder(config).glob(".*.tmp"))
        assert run_step("train", config) == 0
    else:
        assert code == 0
        assert "no room for a checkpoint" in said
        assert ": step-00000002 is kept" in said
    assert_equal(config, undisturbed)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_is_due(new_run, monkeypatch, capfd):
    steps, config = [], new_run(checkpoint_steps=5)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder(config) / "file"))

    def step(self, *arguments, original=loop.Trainer._step):
        steps.append(1)
        time.sleep(0.2 if len(steps) > 5 else 0)  # the first one is being written meanwhile
        return original(self, *arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", refused)
    monkeypatch.setattr(loop.Trainer, "_step", step)
    assert run_step("train", config) == 4
    assert "checkpoints/file cannot be written (Permission denied)" in capfd.readouterr().err
    assert 5 < len(steps) < 9


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_room_for_its_checkpoints_it_does_not_begin(new_run, monkeypatch, capfd, optimizer):
    """Those kept, the best, and one in the making, as large as they come to be."""
    train: dict[str, Any] = {"optimizer": optimizer, "epochs": 1, "keep_checkpoints": 1}
    done, config, usage = new_run("done", **train), new_run(**train), shutil.disk_usage
    assert run_step("train", done) == 0
    one = sum(path.stat().st_size for path in (folder(done) / "last").rglob("*.safetensors"))
    for free, code in ((2.9 * one, 5), (3.1 * one, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(path)._replace(free=int(free)))
        assert run_step("train", config) == code
        assert ("GB free and about" in capfd.readouterr().err) == (code == 5)
        assert list(folder(config).glob("step-*")) == [] or code == 0


def test_a_stop_that_cannot_be_saved_is_told(new_run, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    at_step(monkeypatch, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_step("train", new_run()) == 5
    assert "no room left on the disk" in capfd.readouterr().err


# ---- Beginning from a draft


def test_a_run_begins_from_another_ones_draft(new_run, undisturbed, capfd):
    """And goes on where that one was: its loss is lower from the first step on."""
    config = new_run("fine", init_from=str(folder(undisturbed) / "best"), validation_share=0.0)
    assert run_step("train", config) == 0
    assert "280 of 280 words' output rows" in capfd.readouterr().err
    assert curve(config)[0][1] < 0.8 * curve(undisturbed)[0][1]
    assert run_step("train", new_run("gone", init_from="nowhere")) == 4
    assert "train: init_from nowhere has no config.json" in capfd.readouterr().err
