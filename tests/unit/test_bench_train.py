"""The benchmark of training: its rows, its count of operations, and that it runs."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import train
from benchmarks.command import machine
from benchmarks.training import TINY, Setting, make_row, operations
from pipeline.train.loss import supervised_at


def test_rows_are_full_and_as_supervised_as_asked_for():
    setting = Setting(hidden=4, supervised=0.6)
    row = make_row(setting, 1, torch.float32, torch.device("cpu"))
    assert row.documents[-1][1] == setting.tokens
    assert float(row.supervised_R.float().mean()) == pytest.approx(0.6, abs=0.01)
    assert torch.equal(row.tokens_R, make_row(setting, 1, torch.bfloat16, torch.device("cpu")).tokens_R)


def test_operations_by_hand():
    """One step, no attention to speak of: each weight twice a token forward, and twice that backward."""
    setting = replace(TINY, steps=1, tokens=256)
    row = make_row(setting, 0, torch.float32, torch.device("cpu"))
    wide, tokens = setting.heads * setting.head_dim, 256
    layer = 7 * setting.hidden * wide + 3 * setting.hidden * setting.inner
    head = setting.hidden * setting.words
    pairs = sum((end - start) * (end - start + 1) // 2 for start, end in row.documents)
    want = 2 * tokens * (3 * layer + 2 * 3 * setting.hidden**2 + 2 * head + head) + 14 * wide * pairs
    assert operations(setting, row, all_of_it=True) == want

    asking = int(supervised_at(row, 0).sum())
    needed = 2 * (3 * 4 * setting.hidden * wide * tokens + 3 * (layer - 4 * setting.hidden * wide) * asking)
    needed += 2 * (2 * 3 * setting.hidden**2 * tokens + 3 * head * int(row.supervised_R.sum()))
    pairs = int((row.positions_R + 1)[supervised_at(row, 0)].sum())
    assert operations(setting, row, all_of_it=False) == needed + 14 * wide * pairs


def test_it_runs_on_a_machine_without_a_gpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.train",
        "--tiny",
        "--repeat",
        "1",
        "--steps",
        "2",
        "--optimizer",
        "muon",
    ]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.jsonl")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "aerie" in done.stdout
    assert "parameters trained by muon" in done.stdout
    assert (tmp_path / "figures.jsonl").read_text().count("\n") == 1
    done = subprocess.run([*command, "--reference", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("holds no folder speculators")) == (2, 1)


def test_it_needs_no_vllm(monkeypatch):
    """Nor does what it writes of the machine."""
    monkeypatch.setattr("pipeline.patching.DISTRIBUTIONS", {"vllm": ("no-such-distribution",)})
    assert machine()["vllm"] is None


def test_what_was_not_measured_is_not_met(monkeypatch):
    """Without the other side, or at other sizes than those that are asked for."""
    monkeypatch.setattr(train, "_alternating", lambda *_: {"aerie": []})
    assert train.main(["--tiny", "--require"]) == 1
    monkeypatch.setattr(train, "_is_met", lambda _: True)
    monkeypatch.setattr(train, "_alternating", lambda *_: {})
    assert train.main(["--tiny", "--require"]) == 1
    assert train.main(["--require", "--tokens", "8192", "--steps", "3"]) == 0
