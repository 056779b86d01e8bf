"""A training that is killed or stopped at any step goes on to the same losses and weights; what is not finite is named.

The step runs in this process, on states that the target computed for random ids.
"""

import errno
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline import vocab
from pipeline.__main__ import run_step
from pipeline.config import Run, load
from pipeline.store import read_manifest
from pipeline.store.states import StatesReader
from pipeline.train import checkpoint, data, loop
from pipeline.train import step as train_step
from pipeline.train.randomness import random_state, seed_all, set_random_state
from tests.models import Reference
from tests.runs import CHILD_S
from tests.training import make_hidden, write_config

TRAIN = {
    "epochs": 3, "learning_rate": 1e-3, "rows_per_step": 2, "tokens_per_row": 64, "validation_share": 0.2,
    "noise": 0.05, "checkpoint_steps": 2, "tracker": "tensorboard", "processes": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(llama_folder: Path) -> tuple[Reference, list[list[int]], list[list[int]]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, 4 + i % 9).tolist() for i in range(14)]
    return Reference(llama_folder), prompts, [random.integers(0, 256, 20).tolist() for _ in prompts]


@pytest.fixture
def new_run(tmp_path: Path, llama_folder: Path, inputs):
    def make(name: str = "run", **train) -> Run:
        (tmp_path / name).mkdir()
        path = write_config(
            tmp_path / name / "run.toml", llama_folder, train={**TRAIN, **train}, target={"max_length": 64}
        )
        config = load(path)
        make_hidden(config, *inputs)
        vocab.run(config)
        return config

    return make


@pytest.fixture(autouse=True)
def default_signals():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background has it ignored
    yield
    signal.signal(signal.SIGINT, before)


def folder(config: Run) -> Path:
    return config.folder("checkpoints")


def curve(config: Run) -> list[tuple[int, float]]:
    """As TensorBoard shows it: a run's file takes the place of what earlier ones have from its first step on.

    TensorBoard sorts files by name: two of one process and second, numbered 9 and 10, stand the wrong way round.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[int, float] = {}
    for file in sorted((folder(config) / "logs").iterdir(), key=lambda path: int(path.name.rpartition(".")[2])):
        events = EventAccumulator(str(file))
        events.Reload()
        if "train/loss" not in events.Tags()["scalars"]:
            continue
        scalars = events.Scalars("train/loss")
        values = {step: value for step, value in values.items() if step < scalars[0].step}
        values |= {event.step: event.value for event in scalars}
    return sorted(values.items())


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


def total_steps(config: Run) -> int:
    return read_manifest(folder(config), "train").totals["steps"]


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
        raise PermissionError(errno.EACCES, "Permission denied")

    def step(self, *arguments, original=loop.Trainer._step):
        steps.append(1)
        time.sleep(0.2 if len(steps) > 5 else 0)  # the first one is being written meanwhile
        return original(self, *arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", refused)
    monkeypatch.setattr(loop.Trainer, "_step", step)
    with pytest.raises(PermissionError):
        run_step("train", config)
    assert 5 < len(steps) < 9


def test_a_stop_that_cannot_be_saved_is_told(new_run, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    at_step(monkeypatch, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_step("train", new_run()) == 5
    assert "no room left on the disk" in capfd.readouterr().err


# ---- Numbers that are not finite


def spoil(monkeypatch: pytest.MonkeyPatch, config: Run, wanted: str, value: float) -> None:
    """One state of the sample `wanted` is `value`."""
    original = data.StatesReader.read_into

    def read_into(self, index, aux_SLH, last_SH):
        result = original(self, index, aux_SLH, last_SH)
        if self.sample_ids[index] == wanted:
            last_SH[0, 0] = value  # of a prompt: no loss would show it
        return result

    monkeypatch.setattr(data.StatesReader, "read_into", read_into)


def a_sample_for(config: Run, training: bool) -> str:
    reader = StatesReader(config.folder("hidden"))
    sides = data.split_by_conversation(reader.conversation_ids, config.train.validation_share, config.seed)
    return reader.sample_ids[sides[0 if training else 1][0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_is_named_with_file_and_step(new_run, monkeypatch, capfd, value):
    config = new_run(epochs=1)
    spoil(monkeypatch, config, name := a_sample_for(config, training=True), value)
    assert run_step("train", config) == 4
    said = capfd.readouterr().err
    assert f"sample {name} in shard-00000.safetensors" in said
    assert "states not finite at step " in said
    assert "Traceback" not in said


def test_skipped_steps_leave_the_optimiser_untouched_and_are_counted(new_run, monkeypatch, capfd):
    config = new_run(epochs=1, on_nonfinite="skip", checkpoint_steps=1, keep_checkpoints=100)
    spoil(monkeypatch, config, name := a_sample_for(config, training=True), float("nan"))
    assert run_step("train", config) == 0
    said = capfd.readouterr().err
    assert said.count("states not finite at step ") == 1
    assert f"sample {name} in shard-00000.safetensors; step skipped" in said
    totals = read_manifest(folder(config), "train").totals
    assert totals["skipped_steps"] == 1
    skipped = int(said.split("not finite at step ")[1].split(":")[0])
    after = load_file(folder(config) / f"step-{skipped:08d}/trainer/state.safetensors")
    if skipped > 1:
        before = load_file(folder(config) / f"step-{skipped - 1:08d}/trainer/state.safetensors")
        assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    else:
        assert not any(key.startswith("exp_avg") for key in after)
    steps = [step for step, _ in curve(config)]
    assert skipped not in steps
    assert len(steps) == totals["steps"] - 1


def test_a_run_whose_steps_are_all_skipped_is_an_error(new_run, monkeypatch, capfd):
    config = new_run(epochs=1, on_nonfinite="skip", validation_share=0.0)
    monkeypatch.setattr(loop, "is_finite", lambda row: torch.tensor(False))
    assert run_step("train", config) == 4
    assert "steps were skipped: none had finite numbers" in capfd.readouterr().err


def test_validation_names_them_too(new_run, monkeypatch, capfd):
    config = new_run(epochs=1)
    spoil(monkeypatch, config, name := a_sample_for(config, training=False), float("nan"))
    assert run_step("train", config) == 4
    assert f"not finite in the validation: sample {name} in shard" in capfd.readouterr().err


def test_gradients_that_are_not_finite_name_the_samples_of_the_step(new_run, monkeypatch, capfd):
    config, original = new_run(epochs=1), torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *arguments: original(*arguments) * float("inf"))
    assert run_step("train", config) == 4
    said = capfd.readouterr().err
    assert "gradient norm inf not finite at step 1: samples s" in said


# ---- Progress


def test_progress_for_programs_says_what_the_curves_say(new_run, tmp_path, capfd):
    import json

    config = new_run(progress_json=str(tmp_path / "progress.jsonl"), validation_share=0.2)
    assert run_step("train", config) == 0
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events[0] == "start"
    assert events[-1] == "end"
    assert lines[-1]["outcome"] == "done"
    assert events.count("validation") == events.count("checkpoint") == 5
    last = lines[-1]
    assert last["done_steps"] == last["steps"] == total_steps(config)
    assert last["loss"] == pytest.approx(curve(config)[-1][1])
    assert len(last["acceptance"]) == config.train.ttt_steps
    assert 1 + sum(last["acceptance"]) == pytest.approx(last["acceptance_length"])
    assert last["tokens_per_s"] > 0
    assert last["left_s"] == 0


def test_the_line_says_all_of_it(new_run, tmp_path):
    from pipeline.gpu_use import GpuMonitor, GpuUse
    from pipeline.train.checkpoint import Progress
    from pipeline.train.report import Reporter

    progress = Progress(skipped=2)
    report = Reporter(new_run(tracker="none"), tmp_path, 100, progress, enabled=True)
    report.gpus = GpuMonitor()
    report.gpus.read = lambda: [GpuUse(0, 97, 31 << 30)]
    for step, now in ((10, 100.0), (20, 110.0)):
        progress.step, progress.tokens = step, 1000 * step
        metrics = {"loss": 8.0, "acceptance_length": 1.4, "acceptance_1": 0.3, "acceptance_2": 0.1, "waited_s": 0.5}
        report("train", metrics, progress)
        report._window[-1] = (now, *report._window[-1][1:])
    assert report.line().split("  ")[:-1] == [
        "train", "step 20/100", "loss 8.000", "accepted 1.40 (0.30 / 0.10)", "1,000 tok/s", "GPU 97 %, 31 GiB",
        "5 % waiting for data", "2 steps skipped",
    ]  # fmt: skip
    assert report.line().endswith("elapsed, about 1:20 left")


def test_a_run_begins_from_another_ones_draft(new_run, undisturbed, capfd):
    """And goes on where that one was: its loss is lower from the first step on."""
    config = new_run("fine", init_from=str(folder(undisturbed) / "best"), validation_share=0.0)
    assert run_step("train", config) == 0
    assert "280 of 280 words' output rows" in capfd.readouterr().err
    assert curve(config)[0][1] < 0.8 * curve(undisturbed)[0][1]
    assert run_step("train", new_run("gone", init_from="nowhere")) == 4
    assert "train: init_from nowhere has no config.json" in capfd.readouterr().err
