"""`verify`: what was written and what is there."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.store import checksums, exclusive, file_sha256, finish, records, run_key, write_json
from pipeline.store.manifest import Shard
from pipeline.store.records import write_record
from tests.runs import damaged, make_samples, write_prepared

INPUTS = {"a": 1}


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A folder as `extract` leaves it, of files that only their checksums know."""
    folder = tmp_path / "run" / "hidden"
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", {"step": "extract", "run_key": run_key(INPUTS), "inputs": INPUTS})
    finish(folder, "extract", INPUTS, [write(folder, number) for number in range(4)], {})
    return folder


def write(folder: Path, number: int) -> Shard:
    path = folder / f"shard-{number:05d}.safetensors"
    path.write_bytes(bytes([number]) * (3 << 20))
    return Shard.describe(path, 1, 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def verify(folder: Path, *flags: str) -> int:
    return main(["verify", str(folder), *flags])


def test_whole_folder(hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert verify(hidden) == 0
    out, err = capsys.readouterr()
    assert f"verify  {hidden}: 4 of 4 files as written  12.6 MB in 0:00, " in out
    assert out.rstrip().endswith(" MB/s")
    assert err == ""


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "deleted", "duplicated"])
def test_damaged_shard(hidden: Path, damage: str, capsys: pytest.CaptureFixture[str]):
    shard, other = hidden / "shard-00002.safetensors", hidden / "shard-00001.safetensors"
    if damage == "flip":
        flip(shard)
    elif damage == "cut":
        os.truncate(shard, 5)
    elif damage == "longer":
        shard.write_bytes(shard.read_bytes() + b"x")
    elif damage == "deleted":
        shard.unlink()
    else:
        shard.write_bytes(other.read_bytes())
    bad = shard.read_bytes() if shard.exists() else None
    assert verify(hidden) == 4
    out, err = capsys.readouterr()
    assert "3 of 4 files as written" in out
    assert f"verify: {shard} {'is missing' if damage == 'deleted' else ''}" in err
    assert "run extract again" in err
    assert not shard.exists()
    assert damaged(hidden) == ([f"{shard.name}.damaged-1"] if bad else [])
    if bad:
        assert (hidden / f"{shard.name}.damaged-1").read_bytes() == bad, "kept as it was"
    assert verify(hidden) == 4, "until it is made again"
    write(hidden, 2)
    assert verify(hidden) == 0


def test_a_second_damaged_file_does_not_replace_the_first(hidden: Path):
    for _ in range(2):
        flip(hidden / "shard-00000.safetensors")
        assert verify(hidden) == 4
        write(hidden, 0)
    assert damaged(hidden) == ["shard-00000.safetensors.damaged-1", "shard-00000.safetensors.damaged-2"]


def test_unfinished_folder_by_its_records(hidden: Path, capsys: pytest.CaptureFixture[str]):
    (hidden / "manifest.json").unlink()
    for number in (0, 1):
        write_record(hidden, Shard.describe(hidden / f"shard-{number:05d}.safetensors", 1, 1), run_key(INPUTS))
    assert verify(hidden) == 0
    assert "2 of 2 files as written, unfinished" in capsys.readouterr().out
    flip(hidden / "shard-00001.safetensors")
    flip(hidden / "shard-00003.safetensors")  # has no record: half-written, as far as anyone knows
    assert verify(hidden) == 4
    assert damaged(hidden) == ["shard-00001.safetensors.damaged-1"]
    (hidden / "shard-00000.safetensors").unlink()
    capsys.readouterr()
    assert verify(hidden) == 4
    assert "shard-00000.safetensors is missing" in capsys.readouterr().err


def test_an_unfinished_folder_of_nothing(hidden: Path, capsys: pytest.CaptureFixture[str]):
    (hidden / "manifest.json").unlink()
    assert verify(hidden) == 4
    assert capsys.readouterr().err == f"verify: {hidden} has no finished file yet\n"


@pytest.mark.parametrize(("number", "moved"), [(errno.EIO, True), (errno.ENFILE, False), (errno.ESTALE, False)])
def test_a_file_that_cannot_be_read_is_damaged_only_where_the_medium_says_so(
    hidden: Path, monkeypatch: pytest.MonkeyPatch, number: int, moved: bool, capsys: pytest.CaptureFixture[str]
):
    fault = OSError(number, os.strerror(number))
    monkeypatch.setattr(records, "checksums", lambda paths, *_: (fault for _ in paths))
    assert verify(hidden) == 4
    assert f"shard-00000.safetensors cannot be read ({os.strerror(number)})" in capsys.readouterr().err
    assert len(damaged(hidden)) == (4 if moved else 0)


def test_nothing_is_moved_under_a_writer(hidden: Path, capsys: pytest.CaptureFixture[str]):
    flip(hidden / "shard-00001.safetensors")
    with exclusive(hidden, "extract"):
        assert verify(hidden) == 4
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err
    assert damaged(hidden) == []


def test_all_folders_of_a_run(hidden: Path, capsys: pytest.CaptureFixture[str]):
    """Of those that `extract` cannot make again nothing is moved."""
    prepared = hidden.parent / "prepared"
    write_prepared(prepared, make_samples([4, 5, 6, 7]))
    assert verify(hidden.parent) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"verify  {hidden}",
        f"verify  {prepared}",
    ]
    bad = prepared / "samples-00001.parquet"
    flip(bad)
    assert verify(hidden.parent) == 4
    assert f"Remove {prepared / 'manifest.json'} and run prepare again" in capsys.readouterr().err
    assert bad.exists()


def test_a_manifest_that_was_changed(hidden: Path, capsys: pytest.CaptureFixture[str]):
    text = (hidden / "manifest.json").read_text()
    (hidden / "manifest.json").write_text(text.replace('"a": 1', '"a": 2'))
    assert verify(hidden) == 4
    assert "is not a valid manifest" in capsys.readouterr().err
    (hidden / "manifest.json").write_text("{")
    assert verify(hidden) == 4


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_what_is_no_run(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]):
    assert verify(tmp_path / place) == 4
    assert "is no folder of a run" in capsys.readouterr().err


def test_checksums_in_order_whatever_the_threads(tmp_path: Path):
    paths = [tmp_path / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(os.urandom(number * 200_000))
    read: list[int] = []
    for threads in (1, 4):
        assert list(checksums.checksums(paths, threads, read.append)) == [file_sha256(path) for path in paths]
    assert sum(read) == 2 * sum(path.stat().st_size for path in paths)
    (result,) = checksums.checksums([tmp_path / "absent"])
    assert isinstance(result, FileNotFoundError)
