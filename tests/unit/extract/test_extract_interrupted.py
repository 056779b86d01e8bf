"""Killed at any write, damaged, without room, given wrong states: the step goes on to the same bytes."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.extract.engines import Captured
from pipeline.store import exclusive
from pipeline.store.samples import Sample
from tests.extraction import FILES, LENGTHS, SHARD_TOKENS, StandIn, extract, killed_at
from tests.runs import contents, damaged, errors, make_samples, small_file_system, write_run

# ---- Interruptions


def test_killed_at_every_write_and_run_again_gives_the_same_bytes(
    tmp_path: Path, target: Path, undisturbed: dict[str, str]
):
    """Plan, shards, records, manifest: each rename is a state in which a killed run may leave the folder."""
    kills = 0
    while True:
        folder = tmp_path / str(kills)
        config = write_run(folder, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
        killed = killed_at(config, kills)
        assert extract(config) == 0
        assert contents(folder / "runs" / "test" / "hidden") == undisturbed, f"killed at event {kills}"
        if not killed:
            break
        kills += 1
    assert kills == 2 * (1 + 2 * len([name for name in undisturbed if name.startswith("shard")]) + 1)


def test_killed_again_and_again(config: Path, hidden: Path, undisturbed: dict[str, str]):
    """Each attempt gets one shard further."""
    attempts = 0
    while killed_at(config, 5 if attempts == 0 else 3):
        attempts += 1
        assert attempts < 20
    assert attempts >= 3
    assert contents(hidden) == undisturbed


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty", "no record", "torn record", "foreign record"])
def test_damaged_shard_of_an_unfinished_folder_is_made_again(
    config: Path, hidden: Path, undisturbed: dict[str, str], damage: str, capsys: pytest.CaptureFixture[str]
):
    assert killed_at(config, 12)  # plan, two shards, two records and the third shard are there
    shard, record = hidden / FILES[0], hidden / "shard-00000.json"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 4
        shard.write_bytes(data)
    elif damage == "cut":
        os.truncate(shard, 1000)
    elif damage == "swap":
        shard.write_bytes((hidden / FILES[1]).read_bytes())
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "no record":
        record.unlink()
    elif damage == "torn record":
        record.write_bytes(record.read_bytes()[:30])
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "run_key": "0"}))
    capsys.readouterr()
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert f"to be made again ({FILES[0]}" in capsys.readouterr().out
    assert damaged(hidden) == ([] if "record" in damage else [f"{FILES[0]}.damaged-1"])


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign"])
def test_damaged_shard_of_a_finished_folder_is_made_again(
    config: Path, hidden: Path, undisturbed: dict[str, str], damage: str, stand_in: type[StandIn]
):
    assert extract(config) == 0
    shard = hidden / FILES[1]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, 100)
    else:
        shard.write_bytes(shard.read_bytes().replace(b"run_key", b"run_kex"))
    before = stand_in.started
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert stand_in.started == before + 1


def test_a_flipped_bit_of_a_finished_folder_is_found_by_verify_and_made_again(
    config: Path, hidden: Path, undisturbed: dict[str, str]
):
    assert extract(config) == 0
    data = bytearray((hidden / FILES[4]).read_bytes())
    data[-9] ^= 2
    (hidden / FILES[4]).write_bytes(data)
    assert main(["verify", str(hidden)]) == 4
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert main(["verify", str(hidden.parent)]) == 0
    assert (hidden / damaged(hidden)[0]).read_bytes() == data


def test_what_another_process_puts_in_a_shards_place_is_not_vouched_for(
    config: Path, hidden: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Between a shard's name and its record."""
    rename = os.replace

    def replace(source, destination, **keywords):
        rename(source, destination, **keywords)
        if Path(destination).name == FILES[2]:
            Path(destination).write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert extract(config) == 0
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_leftovers_of_killed_writers_are_removed(config: Path, hidden: Path, undisturbed: dict[str, str]):
    assert killed_at(config, 4)
    (hidden / ".shard-00099.safetensors.tmp").write_bytes(b"x")
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_two_at_once(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    with exclusive(hidden, "extract"):
        assert extract(config) == 6
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err
    assert not (hidden / "plan.json").exists()


# ---- Full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    with small_file_system(tmp_path / "disk", "256k") as folder:
        yield folder


def test_too_little_room_is_told_before_the_engine_starts(
    small_disk: Path, target: Path, stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
):
    config = write_run(small_disk, target, make_samples([64] * 20), shard_tokens=SHARD_TOKENS, max_length=64)
    assert extract(config) == 5
    message = capsys.readouterr().err
    assert "0.00 GB free" in message or "MB free" in message
    assert len(message.splitlines()) == 1
    assert stand_in.started == 0


def test_disk_that_fills_up_meanwhile(
    small_disk: Path,
    target: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    config = write_run(small_disk, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
    hidden = small_disk / "runs" / "test" / "hidden"
    ballast = small_disk / "ballast"

    def fill(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-4":
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "fault", fill)
        assert extract(config) == 5
    message = capsys.readouterr().err
    assert "no room left on the disk" in message
    assert "it goes on" in message
    assert stand_in.closed == stand_in.started
    assert not [name for name in contents(hidden) if name.startswith(".") or name == "manifest.json"]
    ballast.unlink()
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


# ---- Wrong states


def not_finite(captured: Captured) -> None:
    captured.states_LSH[1][2, 3] = float("nan")


def infinite(captured: Captured) -> None:
    captured.states_LSH[-1][0, 0] = float("inf")


def shorter(captured: Captured) -> None:
    captured.states_LSH[0] = captured.states_LSH[0][:-1]


def other_dtype(captured: Captured) -> None:
    captured.states_LSH[2] = captured.states_LSH[2].half()


def one_layer_less(captured: Captured) -> None:
    captured.states_LSH.pop()


def other_ids(captured: Captured) -> None:
    captured.input_ids_S[1] += 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (not_finite, "layer 4 are not finite from token 2 on"),
        (infinite, "layer 8 are not finite from token 0 on"),
        (shorter, "layer 2 are [44, 16], not [45, 16]"),
        (other_dtype, "layer 5 are torch.float16, not torch.float32"),
        (one_layer_less, "states of 3 layers, not 4"),
        (other_ids, "other token ids"),
    ],
)
def test_wrong_states_are_never_written(
    config: Path,
    hidden: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault,
    words: str,
):
    """One line that names the sample; what was finished before it stays, and the next run goes on."""

    def on_sample_4(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-4":
            fault(captured)
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "fault", on_sample_4)
        assert extract(config) == 4
    (message,) = errors(capsys.readouterr().err)
    assert message.startswith("extract: sample sample-4: ")
    assert words in message
    assert stand_in.closed == stand_in.started
    assert not (hidden / "manifest.json").exists()
    assert FILES[0] in contents(hidden)
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_engine_is_closed_on_ctrl_c(config: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch):
    def interrupt(self, captured: Captured, sample: Sample) -> Captured:
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in, "fault", interrupt)
    assert extract(config) == 130
    assert stand_in.closed == stand_in.started
