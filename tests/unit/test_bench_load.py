"""The benchmark of training's loader: that it runs, leaves nothing, and says so where there is no room."""

import json
from pathlib import Path

import pytest

from benchmarks import load

SIZES = ["--hidden-size", "16", "--tokens", "8192", "--shard-tokens", "4096", "--row-tokens", "2048"]


def test_it_reads_in_every_way_and_removes_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(load, "_apart", load._measure)
    assert load.main(["--folder", str(tmp_path / "load"), *SIZES, "--json", str(tmp_path / "figures.jsonl")]) == 0
    runs = json.loads((tmp_path / "figures.jsonl").read_text())["runs"]
    assert len(runs) == len(load.STORED) * len(load.WAYS) * 2
    assert all(run["tokens_per_s"] > 0 for run in runs)
    assert capsys.readouterr().out.count("tok/s") == len(runs)
    assert not list((tmp_path / "load").iterdir())


def test_without_room_it_ends_with_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert load.main(["--folder", str(tmp_path / "load"), "--tokens", str(10**15)]) == 5
    assert "GB free" in capsys.readouterr().err
    assert not list((tmp_path / "load").iterdir())
