"""What a training tells: which numbers are not finite, and how far it is, to people and to programs."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.__main__ import run_step
from pipeline.config import Run
from pipeline.gpu_use import GpuMonitor, GpuUse
from pipeline.store import read_manifest
from pipeline.store.states import StatesReader
from pipeline.train import data, loop
from pipeline.train.checkpoint import Progress
from pipeline.train.report import Reporter
from tests.short_training import curve, folder, make_inputs, make_run, total_steps
from tests.training import Answers


@pytest.fixture(scope="module")
def inputs(llama_folder: Path) -> Answers:
    return make_inputs(llama_folder)


@pytest.fixture
def new_run(tmp_path: Path, llama_folder: Path, inputs: Answers):
    return partial(make_run, tmp_path, llama_folder, inputs)


# ---- Numbers that are not finite


def spoil(monkeypatch: pytest.MonkeyPatch, config: Run, wanted: str, value: float) -> None:
    """One state of the sample `wanted` is `value`."""
    original = data.StatesReader.read_into

    def read_into(self, index, aux_SLH, last_SH, scales=None):
        result = original(self, index, aux_SLH, last_SH, scales)
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
