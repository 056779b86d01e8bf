"""What is told while states are made."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.extract import progress as module
from pipeline.extract.progress import Counts, Progress, Speed
from pipeline.gpu_use import GpuMonitor, GpuUse
from pipeline.progress import clock, scaled
from pipeline.store.json_lines import JsonLines
from tests.extraction import StandIn, extract


class Clock:
    """Time that a test sets."""

    s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def at() -> Clock:
    return Clock()


def make(folder: Path, at: Clock, **more) -> Progress:
    counts = Counts(100, 2_000_000, 10, done_samples=10, done_tokens=200_000, written_bytes=1_500_000_000)
    return Progress(folder, counts, now=at, **more)


def test_line(tmp_path: Path, at: Clock, capsys: pytest.CaptureFixture[str]):
    progress = make(tmp_path, at)
    at.s = 170.0
    progress.tick()
    assert capsys.readouterr().err == "extract  the engine is starting  1:10 elapsed\n"
    progress.begin()
    at.s = 180.0
    progress.advance(50_000)
    progress.tick()
    assert capsys.readouterr().err == "extract  the engine started in 1:10, first states 10.0 s later\n"
    at.s = 190.0
    progress.advance(100_000)
    at.s = 200.0
    progress.tick()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("extract  12/100 samples  350.0 ktok  5,000 tok/s  1.5 GB written, ")
    assert line.endswith(" free  0:30 elapsed, about 5:30 left")
    at.s = 229.0
    progress.tick()
    assert capsys.readouterr().err == ""
    speed = progress.tokens_per_s
    progress.end()
    at.s = 240.0
    assert (progress.elapsed_s, progress.tokens_per_s) == (59.0, speed), "what the engine's end takes does not count"


def test_the_first_tokens_are_not_in_the_speed():
    """A first forward pass that compiles for a minute says nothing of the speed."""
    speed = Speed(0.0)
    for second in range(60, 71):
        speed.add(1000, second)
        speed.add(1000, second + 0.01)
    assert speed.tokens_per_s(70.01) == pytest.approx(2000, rel=0.01)
    assert speed.first_s == 60


def test_the_time_of_a_first_burst_is_not_in_the_speed_either():
    speed = Speed(0.0)
    speed.add(5000, 10.0)
    speed.add(5000, 10.4)
    for tenths in range(106, 115):
        speed.add(1000, tenths / 10)
    assert speed.tokens_per_s(11.4) == pytest.approx(9000)


def test_what_the_engines_end_takes_is_not_in_the_speed(
    config: Path, tmp_path: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stand_in, "close", lambda self: time.sleep(1.0))
    path = tmp_path / "progress.jsonl"
    assert extract(config, "--extract.progress_json", str(path)) == 0
    shard, end = (json.loads(line) for line in path.read_text().splitlines()[-2:])
    assert end["time"] - shard["time"] >= 1.0
    assert end["elapsed_s"] - shard["elapsed_s"] < 0.5


def test_json_lines(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "new" / "progress.jsonl"
    assert extract(config, "--extract.progress_json", str(path)) == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "ready", *["shard"] * 6, "end"]
    last = events[-1]
    assert (last["done_samples"], last["done_tokens"], last["done_shards"], last["outcome"]) == (8, 216, 6, "done")
    assert (last["samples"], last["tokens"], last["shards"], last["part"]) == (8, 216, 6, "1/1")
    assert 0 <= last["first_token_s"] <= last["elapsed_s"]
    assert last["written_bytes"] == sum(p.stat().st_size for p in (tmp_path / "runs/test/hidden").glob("*.safetensors"))
    assert last["free_bytes"] > 0
    assert last["tokens_per_s"] > 0
    assert last["left_s"] == 0
    assert abs(last["time"] - time.time()) < 60
    assert {"start_s", "gpus", "step"} <= set(last)


def test_json_on_stderr_is_alone_there(config: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BAR_INTERVAL_S", 0.001)
    assert extract(config, "--extract.progress_json=-") == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().err.splitlines()]


def test_json_says_how_it_ended(config: Path, tmp_path: Path, stand_in: type[StandIn], monkeypatch):
    def interrupted(self, captured, sample):
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in, "fault", interrupted)
    path = tmp_path / "progress.jsonl"
    assert extract(config, "--extract.progress_json", str(path)) == 130
    assert json.loads(path.read_text().splitlines()[-1])["outcome"] == "stopped"


def test_a_step_that_hangs_is_still_told_of(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "BAR_INTERVAL_S", 0.01)
    progress = Progress(tmp_path, Counts(1, 1), gpus=GpuMonitor(nvml()))
    progress.open()
    progress.begin()
    time.sleep(0.3)
    progress.close()
    assert len(capsys.readouterr().err.splitlines()) >= 2


def test_bar_on_a_terminal(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(module, "BAR_INTERVAL_S", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(tmp_path, Counts(4, 400), gpus=GpuMonitor(nvml()))
    progress.open()
    progress.begin()
    progress.advance(100)
    time.sleep(0.2)
    progress.close()
    text = capsys.readouterr().err
    assert " 25%|" in text
    assert "1/4 samples  100 tok" in text
    assert "2 GPUs 60 %, 71 GiB" in text


def test_json_that_cannot_be_written_does_not_stop_the_step(capsys: pytest.CaptureFixture[str]):
    lines = JsonLines("/dev/full")
    lines.write({"a": 1})
    lines.write({"a": 2})
    lines.close()
    assert capsys.readouterr().err == "/dev/full cannot be written (No space left on device): no more lines\n"


def test_a_closed_stderr_does_not_stop_the_step_either(monkeypatch: pytest.MonkeyPatch):
    def broken(*_arguments, **_keywords):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stderr, "write", broken)
    lines = JsonLines("-")
    lines.write({"a": 1})
    lines.write({"a": 2})


def nvml(**other) -> SimpleNamespace:
    """A stand-in for pynvml with two GPUs."""
    return SimpleNamespace(**{
        "NVMLError": RuntimeError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=50 + 20 * handle),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=(70 + handle) * 2**30),
        **other,
    })  # fmt: skip


def raise_error(*_: object) -> None:
    raise RuntimeError


def test_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuMonitor(nvml()).read() == [GpuUse(0, 50, 70 * 2**30), GpuUse(1, 70, 71 * 2**30)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in GpuMonitor(nvml()).read()] == [1]
    assert GpuMonitor(nvml(nvmlInit=raise_error)).read() == []
    assert GpuMonitor(nvml(nvmlDeviceGetUtilizationRates=raise_error)).read() == []


def test_units():
    assert [scaled(n) for n in (999, 1000, 26_200_000, 1.5e12)] == ["999 ", "1.0 k", "26.2 M", "1.5 T"]
    assert [clock(s) for s in (0, 59.6, 724, 4920)] == ["0:00", "1:00", "12:04", "1 h 22"]
