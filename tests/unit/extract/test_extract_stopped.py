"""Killed, stopped, refused by the disk: what is finished is kept, and the next run ends with the same bytes."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline.stop
from pipeline.extract import engines, plan, space, stop
from pipeline.extract.engines import Captured
from pipeline.store import file_sha256, tensors
from pipeline.store.samples import Sample
from tests.extraction import (  # fmt: skip
    FILES,
    HIDDEN,
    LENGTHS,
    MANIFEST,
    POINTS,
    SHARD_TOKENS,
    Slow,
    StandIn,
    extract,
    killed_in,
)
from tests.runs import contents, ended, errors, in_child, inodes, kept, make_samples, small_file_system, write_run
from tests.soak import Campaign

# ---- SIGKILL


def test_thirty_kills_at_random_moments(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch):
    """One process and two side by side, with damaged files in between; `make soak` is the longer one."""
    monkeypatch.setattr(engines, "start", Slow)
    result = Campaign(tmp_path, target, kills=30, seed=int(time.time())).run()
    assert result.kills >= 30


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point_loses_unfinished_shards_only(
    config: Path, hidden: Path, undisturbed: dict[str, str], point: str
):
    killed_in(config, point)
    assert (hidden / MANIFEST).exists() == (point == "after the manifest")
    there = kept(hidden)
    assert len(there) == {"before the manifest": 6, "after the manifest": 6, "after the record": 3}.get(point, 2)
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert there.items() <= inodes(hidden).items(), "made again"


# ---- SIGTERM and SIGINT


def on_sample_4(act) -> object:
    def fault(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-4":
            act()
        return captured

    return fault


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_shard_in_hand_be_finished(
    config: Path,
    hidden: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    code: int,
):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background has it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(stand_in, "fault", on_sample_4(lambda: os.kill(os.getpid(), number)))
            assert extract(config) == code
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capfd.readouterr().err.splitlines() == [
        "extract: stops when the shard in hand is finished, in 45 s at the latest; once more: at once",
        "extract: stopped. Run it again: it goes on",
    ]
    assert sorted(path.name for path in hidden.glob("*.safetensors")) == FILES[:4]
    assert stand_in.closed == stand_in.started
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_sigterm_during_a_commit(
    config: Path, hidden: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    rename = os.replace

    def replace(source, destination, **keywords):
        if Path(destination).name == FILES[1]:
            os.kill(os.getpid(), signal.SIGTERM)
        rename(source, destination, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert extract(config) == 143
    assert {path.name for path in hidden.glob("shard-*")} == {*FILES[:2], "shard-00000.json", "shard-00001.json"}
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_a_shard_that_takes_too_long_is_given_up(
    config: Path, hidden: Path, undisturbed: dict[str, str], stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch
):
    def hang() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(stop, "GRACE_S", 0.1)
        patch.setattr(stand_in, "fault", on_sample_4(hang))
        assert extract(config) == 143
    assert time.monotonic() - began < 10
    assert sorted(path.name for path in hidden.glob("*.safetensors")) == FILES[:3]
    assert stand_in.closed == stand_in.started
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_an_engine_that_does_not_end_does_not_keep_the_process(config: Path, monkeypatch: pytest.MonkeyPatch):
    def work() -> int:
        pipeline.stop.EXIT_S = 0.2
        StandIn.fault = on_sample_4(lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[method-assign]
        StandIn.close = lambda self: time.sleep(60)
        return extract(config)

    began = time.monotonic()
    assert ended(in_child(work)) == 143
    assert time.monotonic() - began < 10


def test_a_second_signal_ends_at_once(config: Path, hidden: Path, undisturbed: dict[str, str]):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    def work() -> int:
        StandIn.fault = on_sample_4(twice)  # type: ignore[method-assign]
        return extract(config)

    assert ended(in_child(work)) == -signal.SIGTERM
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_a_signal_while_the_target_is_loaded_ends_at_once(config: Path, monkeypatch: pytest.MonkeyPatch):
    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(engines, "start", load)
    began = time.monotonic()
    assert extract(config) == 143
    assert time.monotonic() - began < 10


def test_workers_that_a_signal_took_along_are_no_fault(
    config: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def die() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("cancelled")

    monkeypatch.setattr(stand_in, "fault", on_sample_4(die))
    assert extract(config) == 143
    assert "the shard in hand could not be finished: cancelled" in capfd.readouterr().err


# ---- A second writer


def test_a_second_process_is_refused_by_the_first_ones_number(
    config: Path, hidden: Path, undisturbed: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    reader, writer = os.pipe()

    def at_work() -> None:
        os.write(writer, b"x")
        time.sleep(60)

    def work() -> int:
        StandIn.fault = on_sample_4(at_work)  # type: ignore[method-assign]
        return extract(config)

    child = in_child(work)
    os.read(reader, 1)
    before = contents(hidden)
    assert extract(config) == 6
    assert f"{hidden} is being written by process {child} on " in capsys.readouterr().err
    assert contents(hidden) == before
    os.kill(child, signal.SIGKILL)
    ended(child)
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


@pytest.mark.parametrize("pid", [1, 2])
def test_a_second_signal_ends_process_1_of_a_container_too(monkeypatch: pytest.MonkeyPatch, pid: int):
    """The kernel takes no default action on it."""
    ended_with: list[int] = []
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(os, "_exit", ended_with.append)
    with stop.ShardSignals() as signals:
        signals._in_hand = True
        signals._note(signal.SIGTERM, None)
        again = signal.getsignal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if pid == 1:
        assert callable(again)
        again(signal.SIGTERM, None)
        assert ended_with == [143]
    else:
        assert again == signal.SIG_DFL


# ---- The disk


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """The disk does not take the file `name`."""
    rename = os.replace

    def replace(source, destination, **keywords):
        if Path(destination).name == name:
            raise OSError(number, os.strerror(number), str(destination))
        rename(source, destination, **keywords)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("name", ["plan.json", FILES[2], "shard-00002.json", MANIFEST])
@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EIO, 4), (errno.EROFS, 4)])
def test_a_file_that_the_disk_does_not_take(
    config: Path,
    hidden: Path,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    number: int,
    code: int,
):
    with monkeypatch.context() as patch:
        refuse(patch, name, number)
        assert extract(config) == code
    (line,) = errors(capsys.readouterr().err)
    assert "it goes on" in line
    assert name in line
    assert not (hidden / MANIFEST).exists()
    assert not list(hidden.glob(".*tmp*"))
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


@pytest.mark.parametrize("where", ["data", "sync"])
def test_a_write_error_inside_a_shard(
    config: Path, hidden: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, where: str
):
    write, sync = os.write, os.fsync

    def failing_write(file: int, data: memoryview) -> int:
        if FILES[2] in Path(f"/proc/self/fd/{file}").readlink().name:
            raise OSError(errno.EIO, "Input/output error")
        return write(file, data)

    def failing_sync(file: int) -> None:
        if FILES[2] in Path(f"/proc/self/fd/{file}").readlink().name:
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    with monkeypatch.context() as patch:
        if where == "data":
            patch.setattr(tensors.os, "write", failing_write)
        else:
            patch.setattr(tensors.os, "fsync", failing_sync)
        assert extract(config) == 4
    assert sorted(path.name for path in hidden.glob("*.safetensors")) == FILES[:2]
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_what_cannot_be_read_is_told_as_that(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    prepared = config.parent / "runs" / "test" / "prepared" / "samples-00000.parquet"

    def failing_read(*_):
        raise OSError(errno.EIO, "Input/output error", str(prepared))

    monkeypatch.setattr(plan, "read_samples", failing_read)
    assert extract(config) == 4
    (line,) = errors(capsys.readouterr().err)
    assert f"{prepared} cannot be read or written (Input/output error)" in line


def test_too_little_memory_is_said_before_the_engine_starts(
    config: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two shards at most are in memory where two are to be made, of 50 and 20 tokens."""
    assert extract(config) == 0
    for name in FILES[1:3]:
        (config.parent / "runs" / "test" / "hidden" / name).unlink()
    started, token_bytes = stand_in.started, 4 * HIDDEN * 4
    wanted = 4 * 8192 * token_bytes + 2 * 50 * token_bytes
    monkeypatch.setattr(space.memory, "room_bytes", lambda: wanted - 1)
    capsys.readouterr()
    assert extract(config) == 5
    assert "extract: 2 shards in memory and the states on their way" in capsys.readouterr().err
    assert stand_in.started == started
    assert extract(config, "--extract.engine", "speculators") == 3, "another engine, another folder"
    monkeypatch.setattr(space.memory, "room_bytes", lambda: wanted)
    assert extract(config) == 0


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be made read-only by the name in it."""
    with small_file_system(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_read_only_folder_is_told_in_a_line(
    read_only: Path, target: Path, stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
):
    config = write_run(read_only, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
    subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)
    assert extract(config) == 4
    (line,) = errors(capsys.readouterr().err)
    assert "cannot be written (Read-only file system)" in line
    assert stand_in.started == 0


def test_room_is_asked_for_to_the_block(
    config: Path, hidden: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    """What is there already is not asked for again."""
    killed_in(config, "after the record")
    whole = write_run(config.parent / "whole", config.parent, make_samples(LENGTHS))
    whole.write_text(config.read_text().replace(str(config.parent / "runs"), str(whole.parent / "runs")))
    assert extract(whole) == 0
    sizes = {file: (whole.parent / "runs" / "test" / "hidden" / file).stat().st_size for file in FILES}
    block = os.statvfs(hidden).f_frsize
    need = sum(-(-sizes[file] // block) * block + block for file in FILES[3:]) + block
    usage = type("Usage", (), {"free": need - 1})
    with monkeypatch.context() as patch:
        patch.setattr(space.shutil, "disk_usage", lambda folder: usage)
        before, started = contents(hidden), stand_in.started
        assert extract(config) == 5
        assert contents(hidden) == before
        assert stand_in.started == started
        message = capsys.readouterr().err
        assert "GB free and 0.00 GB are still to be written (0.00 GB are there)" in message
        usage.free = need
        assert extract(config) == 0


def test_two_runs_have_the_same_checksums(config: Path, hidden: Path, undisturbed: dict[str, str]):
    assert extract(config) == 0
    assert {file: file_sha256(hidden / file) for file in undisturbed} == undisturbed
