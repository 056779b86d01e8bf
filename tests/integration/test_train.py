"""The train step as a user runs it: one process and several, kill and resume, bad input."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Run
from pipeline.store import Shard, claim, read_manifest
from pipeline.train.data import split_by_conversation
from tests.training import Answers, best_weights, curve, make_answers, prepared_run

PROMPTS, LENGTH = 16, 40
TRAIN = {"epochs": 4, "learning_rate": 1e-3, "rows_per_step": 2, "tokens_per_row": 128, "validation_share": 0.2}


@pytest.fixture(scope="module")
def answers(llama_folder: Path) -> Answers:
    return make_answers(llama_folder, PROMPTS, LENGTH)


ONE, TWO = ("--train.processes", "1"), ("--train.processes", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def command(path: Path, *flags: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "pipeline", "train", "--config", str(path), *flags]


def train(path: Path, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(path, *flags, launcher=launcher), capture_output=True, text=True, check=False, timeout=300
    )


def test_two_processes_give_the_loss_curve_of_one(tmp_path, llama_folder, answers):
    runs = []
    for name, flags in (("one", ONE), ("two", TWO)):
        folder = tmp_path / name
        folder.mkdir()
        path, config = prepared_run(folder, llama_folder, answers, {**TRAIN, "tracker": "tensorboard"})
        done = train(path, *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("samples to train on") == 1
        assert done.stdout.count("acceptance length") == 1
        runs.append(config)
    one, two = (curve(config, "loss") for config in runs)
    assert len(one) >= 8
    assert one[-1] < 0.8 * one[0], "it learns nothing"
    np.testing.assert_allclose(one, two, rtol=2e-4)
    # clipping and AdamW hide a gradient that is too large by a factor: look at it directly
    np.testing.assert_allclose(*(curve(config, "gradient_norm") for config in runs), rtol=5e-3)
    for name, tensor in best_weights(runs[0]).items():
        torch.testing.assert_close(best_weights(runs[1])[name], tensor, rtol=1e-2, atol=2e-3)

    again = train(path)
    assert again.returncode == 0, "another number of processes is not another run"
    assert "already done" in again.stdout


def test_torchrun_starts_it_too_also_with_fewer_rows_than_processes(tmp_path, llama_folder, answers):
    configs = []
    for name, launcher in (("one", ()), ("torchrun", TORCHRUN)):  # under torchrun, train.processes has no effect
        (tmp_path / name).mkdir()
        path, config = prepared_run(tmp_path / name, llama_folder, answers, {**TRAIN, "epochs": 1, "rows_per_step": 1})
        done = train(path, *ONE, launcher=launcher)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("samples to train on") == 1
        assert ("rows_per_step 1 is no multiple of the 2 processes" in done.stderr) == (name == "torchrun")
        configs.append(config)
    one, two = (read_manifest(config.folder("checkpoints"), "train").totals for config in configs)
    assert one["steps"] == two["steps"]
    assert one["acceptance_length"] == pytest.approx(two["acceptance_length"], rel=1e-2)
    for key, tensor in best_weights(configs[0]).items():
        torch.testing.assert_close(best_weights(configs[1])[key], tensor, rtol=1e-2, atol=2e-3)


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory, llama_folder, answers) -> Run:
    path, config = prepared_run(tmp_path_factory.mktemp("two"), llama_folder, answers, {**TRAIN, **STOPPED})
    assert train(path, *TWO).returncode == 0
    return config


STOPPED = {"checkpoint_steps": 2, "tracker": "tensorboard", "noise": 0.05}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_two_processes_stopped_at_any_step_go_on_to_the_same_end(
    tmp_path, llama_folder, answers, two_undisturbed, number, code
):
    path, config = prepared_run(tmp_path, llama_folder, answers, {**TRAIN, **STOPPED})
    takes_ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"import sys; {takes_ctrl_c}; from pipeline.__main__ import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", start, *command(path, *TWO)[3:]], stderr=-1, text=True)
    wait_for(config.folder("checkpoints") / "step-00000002", process)
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert said.count("train: stops when the step in hand is done") == (code > 0)
    assert said.count("train: stopped. Run it again") == (code > 0)
    assert "Traceback" not in said
    assert "Warning" not in said
    done = train(path, *TWO)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("loss", "gradient_norm"):
        assert curve(config, name) == curve(two_undisturbed, name)
    for name, tensor in best_weights(two_undisturbed).items():
        assert torch.equal(best_weights(config)[name], tensor), name


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--train.tokens_per_row", "32", "--target.max_length", "32"], 4, "a sample has"),  # all of them say so
        (["--train.epochs", "5"], 3, "was made with epochs 4, this run has 5"),  # the first one says so
    ],
)
def test_two_processes_tell_a_fault_once_and_end_with_its_code(tmp_path, llama_folder, answers, flags, code, message):
    from pipeline.store.states import StatesReader
    from pipeline.train.step import _inputs

    path, config = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    if code == 3:
        claim(config.folder("checkpoints"), "train", _inputs(config, StatesReader(config.folder("hidden"))))
    done = train(path, *TWO, *flags)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, llama_folder, answers):
    configs = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        path, config = prepared_run(
            tmp_path / name, llama_folder, answers, {**TRAIN, "checkpoint_steps": 5, "noise": 0.05}
        )
        configs.append(config)
        if name == "killed":
            kill_after(path, config.folder("checkpoints") / "step-00000005")
        done = train(path)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (best_weights(config) for config in configs)
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key
    assert not list(configs[1].folder("checkpoints").glob(".*.tmp"))

    again = train(tmp_path / "killed" / "run.toml")
    assert again.returncode == 0
    assert "already done" in again.stdout


def kill_after(path: Path, checkpoint: Path) -> None:
    process = subprocess.Popen(command(path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(checkpoint, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "ended before it was killed"


def wait_for(checkpoint: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not checkpoint.is_dir():
        assert process.poll() is None, "ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_saved_config_carries_the_ids_that_were_captured(tmp_path, llama_folder, answers):
    """0.3.0 saved none, and vLLM's default served other layers than training saw."""
    import json

    path, config = prepared_run(tmp_path, llama_folder, answers, {**TRAIN, "epochs": 1})
    assert train(path).returncode == 0
    saved = json.loads((config.folder("checkpoints") / "best" / "config.json").read_text())
    captured = read_manifest(config.folder("hidden"), "extract").totals["aux_layers"]
    assert saved["eagle_aux_hidden_state_layer_ids"] == captured == [2, 4, 6]
    assert saved["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == captured
    assert saved["norm_before_residual"] is True
    assert saved["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--train.tokens_per_row", "32", "--target.max_length", "32"], 4, "a sample has"),
        (["--train.learning_rate", "-1"], 2, "train.learning_rate: Input should be greater than 0"),
        (["--train.num_key_value_heads", "3"], 2, "not a multiple"),
        (["--runs_dir", "nowhere"], 4, "is not finished (no manifest.json)"),
    ],
)
def test_bad_input_is_one_line(untrained_run, flags, code, message):
    done = train(untrained_run, *flags)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def untrained_run(tmp_path_factory, llama_folder, answers) -> Path:
    return prepared_run(tmp_path_factory.mktemp("untrained"), llama_folder, answers, TRAIN)[0]


def test_checkpoints_of_other_settings_are_refused(tmp_path, llama_folder, answers):
    path, _ = prepared_run(tmp_path, llama_folder, answers, {**TRAIN, "epochs": 1})
    assert train(path).returncode == 0
    done = train(path, "--train.epochs", "2")
    assert done.returncode == 3
    assert "was made with epochs 1, this run has 2" in done.stderr


def test_a_second_process_is_refused_while_one_trains(tmp_path, llama_folder, answers):
    from pipeline.store import exclusive

    path, config = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    with exclusive(config.folder("checkpoints"), "train"):
        done = train(path)
    assert done.returncode == 6
    assert f"being written by process {os.getpid()}" in done.stderr


def test_two_processes_skip_the_same_step(tmp_path, llama_folder, answers):
    """One of them has the state that is not finite; weights stay equal, and only that step is left out."""
    from pipeline.store import finish
    from pipeline.store.states import StatesReader

    path, config = prepared_run(
        tmp_path, llama_folder, answers, {**TRAIN, "epochs": 1, "on_nonfinite": "skip", "tracker": "tensorboard"}
    )
    folder = config.folder("hidden")
    reader = StatesReader(folder)
    sample = split_by_conversation(reader.conversation_ids, config.train.validation_share, config.seed)[0][3]
    spoil(reader, sample)
    manifest = reader.manifest
    shards = [Shard.describe(folder / s.file, s.samples, s.tokens) for s in manifest.shards]
    finish(folder, "extract", manifest.inputs, shards, manifest.totals)
    done = train(path, *TWO)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count(f"sample s{sample} in shard-00000.safetensors; step skipped") == 1
    totals = read_manifest(config.folder("checkpoints"), "train").totals
    assert totals["skipped_steps"] == 1
    assert len(curve(config, "loss")) == totals["steps"] - 1


def spoil(reader, sample: int) -> None:
    """A NaN in the file, in the first aux state of the sample."""
    part = reader._parts[0]
    start, dtype = part.places["aux_hidden_states"]
    row = 3 * reader.manifest.totals["hidden_size"] * dtype.itemsize
    with part.path.open("r+b") as file:
        file.seek(start + int(part.offsets[sample]) * row)
        file.write(np.float32("nan").tobytes())


def test_a_full_disk_during_a_save_is_told_in_a_line_and_leaves_nothing(tmp_path, llama_folder, answers, monkeypatch):
    import errno

    from pipeline.__main__ import run_step
    from pipeline.train import checkpoint

    _, config = prepared_run(tmp_path, llama_folder, answers, {**TRAIN, "epochs": 1})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    assert run_step("train", config) == 5
    assert not list(config.folder("checkpoints").glob("*step*"))
    monkeypatch.undo()
    assert run_step("train", config) == 0, "it goes on once there is room"
