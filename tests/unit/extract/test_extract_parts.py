"""Several jobs into one folder, and `merge`."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.extract.engines import Captured
from pipeline.extract.parts import Part
from pipeline.store import exclusive, exclusive_part
from pipeline.store.samples import Sample
from tests.extraction import FILES, StandIn, extract
from tests.runs import contents, damaged, ended, errors, in_child


def merge(config: Path) -> int:
    return main(["merge", "--config", str(config)])


def part(config: Path, which: str) -> int:
    return extract(config, "--extract.shard", which)


def test_parts_cover_all_shards_once():
    planned = list(range(11))
    for count in (1, 2, 3, 11, 12):
        taken = [Part(number, count).take(planned) for number in range(1, count + 1)]  # type: ignore[arg-type]
        assert sorted(shard for its in taken for shard in its) == planned
        assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_two_processes_side_by_side_give_the_bytes_of_one(
    config: Path, hidden: Path, undisturbed: dict[str, str], tmp_path: Path
):
    def work(number: int) -> int:
        """Each waits in its first sample until the other one is in its own: both hold the folder at once."""

        def fault(self, captured: Captured, sample: Sample) -> Captured:
            (tmp_path / f"at-work-{number}").touch()
            deadline = time.monotonic() + 20
            while not (tmp_path / f"at-work-{3 - number}").exists():
                assert time.monotonic() < deadline, "the other one has not begun"
                time.sleep(0.01)
            return captured

        StandIn.fault = fault  # type: ignore[method-assign]
        return part(config, f"{number}/2")

    children = [in_child(lambda number=number: work(number)) for number in (1, 2)]
    assert [ended(child) for child in children] == [0, 0]
    assert not (hidden / "manifest.json").exists()
    assert merge(config) == 0
    assert contents(hidden) == undisturbed
    assert merge(config) == 0
    assert part(config, "1/2") == 0
    assert extract(config) == 0


def test_more_parts_than_shards(config: Path, hidden: Path, undisturbed: dict[str, str], stand_in: type[StandIn]):
    before = stand_in.started
    for number in range(1, 10):
        assert part(config, f"{number}/9") == 0
    assert stand_in.started == before + len(FILES), "a part without shards starts no engine"
    assert merge(config) == 0
    assert contents(hidden) == undisturbed


def test_without_shard_the_rest_is_made_and_merged(config: Path, hidden: Path, undisturbed: dict[str, str]):
    assert part(config, "2/3") == 0
    kept = (hidden / FILES[1]).stat().st_ino
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert (hidden / FILES[1]).stat().st_ino == kept


def test_merge_names_what_is_missing(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert merge(config) == 4
    assert "was not begun" in capsys.readouterr().err
    assert part(config, "1/2") == 0
    assert merge(config) == 4
    (line,) = errors(capsys.readouterr().err)
    assert f"3 of 6 shards are not done ({FILES[1]}, {FILES[3]}, {FILES[5]})" in line
    assert not (hidden / "manifest.json").exists()


def test_merge_refuses_a_flipped_bit_and_the_part_makes_it_again(
    config: Path, hidden: Path, undisturbed: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert part(config, "1/2") == part(config, "2/2") == 0
    data = bytearray((hidden / FILES[3]).read_bytes())
    data[-1] ^= 1
    (hidden / FILES[3]).write_bytes(data)
    assert merge(config) == 4
    assert f"1 of 6 shards are not done ({FILES[3]})" in capsys.readouterr().err
    assert damaged(hidden) == [f"{FILES[3]}.damaged-1"]
    assert part(config, "2/2") == 0
    assert merge(config) == 0
    assert contents(hidden) == undisturbed


def test_merge_refuses_other_settings(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert part(config, "1/1") == 0
    assert main(["merge", "--config", str(config), "--extract.aux_layers", "[1, 2, 3]"]) == 3
    assert part(config.parent / "run.toml", "1/2") == 0
    assert extract(config, "--extract.aux_layers", "[1, 2, 3]", "--extract.shard", "1/2") == 3
    assert "was made with aux_layers [2, 4, 5], this run has [1, 2, 3]" in capsys.readouterr().err


def test_who_may_work_beside_whom(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    with exclusive_part(hidden, "extract", 1, 2):
        assert part(config, "1/2") == 6
        assert f"part 1/2 of {hidden} is being written by process {os.getpid()} on " in capsys.readouterr().err
        assert part(config, "1/3") == 6
        assert f"split into 2 parts, is being written by process {os.getpid()}" in capsys.readouterr().err
        assert extract(config) == 6
        assert part(config, "2/2") == 0
        assert merge(config) == 6
        assert f"is being written by process {os.getpid()} on " in capsys.readouterr().err
    with exclusive(hidden, "extract"):
        assert part(config, "1/2") == 6
        assert f"{hidden} is being written by process {os.getpid()}" in capsys.readouterr().err
    assert part(config, "1/2") == 0


def test_a_part_leaves_the_temporary_files_of_others_alone(config: Path, hidden: Path):
    assert part(config, "2/2") == 0
    theirs = [hidden / f".{FILES[1]}.tmp", hidden / ".shard-00001.json.tmp"]
    ours = [hidden / f".{FILES[0]}.tmp", hidden / ".shard-00000.json.tmp"]
    for path in theirs + ours:
        path.write_bytes(b"x")
    assert part(config, "1/2") == 0
    assert [path.exists() for path in theirs] == [True] * 2
    assert [path.exists() for path in ours] == [False] * 2
    assert merge(config) == 0
    assert not list(hidden.glob(".*tmp*"))


def test_a_stopped_part_goes_on(
    config: Path,
    hidden: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fault(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-0":  # a second signal would end this process
            os.kill(os.getpid(), signal.SIGTERM)
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "fault", fault)
        assert part(config, "1/2") == 143
    assert [path.name for path in hidden.glob("*.safetensors")] == FILES[:1]
    assert part(config, "1/2") == part(config, "2/2") == 0
    assert "1 of 3 shards are finished and verified" in capsys.readouterr().out
    assert merge(config) == 0
    assert contents(hidden) == undisturbed


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_part(config: Path, text: str, capsys: pytest.CaptureFixture[str]):
    assert extract(config, f"--extract.shard={text}") == 2
    assert "extract.shard: " in capsys.readouterr().err
