"""`extract.store_dtype`: the step with states in fewer bytes."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from pipeline import verify
from pipeline.__main__ import main
from pipeline.config import load
from pipeline.extract import space
from pipeline.extract.step import job_of
from pipeline.store import read_manifest
from pipeline.store.states import StatesReader
from pipeline.train.data import Rows
from tests.extraction import FILES, HIDDEN, LENGTHS, StandIn, extract, killed_at
from tests.runs import contents, damaged, make_samples, write_run

FP8 = ("--extract.store_dtype", "fp8")
TOKENS = sum(LENGTHS)


def hidden_of(folder: Path, target: Path, *flags: str) -> Path:
    """A finished run of its own."""
    folder.mkdir()
    assert extract(write_run(folder, target, make_samples(LENGTHS), shard_tokens=60, max_length=64), *flags) == 0
    return folder / "runs" / "test" / "hidden"


def test_training_reads_what_was_computed_but_for_the_error(config: Path, hidden: Path, target: Path, tmp_path: Path):
    assert extract(config, *FP8) == 0
    exact = StatesReader(hidden_of(tmp_path / "exact", target))
    reader = StatesReader(hidden)
    for index in range(len(LENGTHS)):
        got, want = reader.read(index), exact.read(index)
        assert got.input_ids_S.tolist() == want.input_ids_S.tolist()
        largest_SL1 = want.aux_states_SLH.abs().amax(-1, keepdim=True)
        error_SLH = (got.aux_states_SLH - want.aux_states_SLH).abs()
        assert (error_SLH <= want.aux_states_SLH.abs() / 16 + largest_SL1 / 2**18).all()
    (row,) = Rows(reader, [0, 1, 2], 128, 0, 1).of_epoch(0)
    assert Rows(reader, [0, 1, 2], 128, 0, 1).load(row).aux_RLH.dtype == torch.float32


def test_the_manifest_says_how_states_are_stored(config: Path, hidden: Path):
    assert extract(config, *FP8) == 0
    manifest = read_manifest(hidden, "extract")
    assert manifest.inputs["store_dtype"] == manifest.totals["store_dtype"] == "fp8"
    assert manifest.totals["dtype"] == "float32", "what readers get"
    assert manifest.totals["size_bytes"] < TOKENS * 4 * (HIDDEN + 4) + 8 * 1000


def test_a_choice_that_changes_nothing_leaves_the_run_key(config: Path):
    """A folder from before there was one goes on."""

    def inputs(dtype: str, store_dtype: str | None) -> dict:
        overrides = {"target": {"dtype": dtype}, "extract": {"store_dtype": store_dtype}}
        return job_of(load(config, overrides)).inputs

    assert inputs("bfloat16", "bf16") == inputs("bfloat16", None)
    assert "store_dtype" not in inputs("bfloat16", None)
    assert inputs("float32", "bf16")["store_dtype"] == "bf16"
    assert inputs("bfloat16", "fp8")["store_dtype"] == "fp8"


@pytest.mark.parametrize(("first", "then"), [((), FP8), (FP8, ()), (FP8, ("--extract.store_dtype", "bf16"))])
@pytest.mark.parametrize("finished", [True, False])
def test_another_choice_is_refused_by_name(config: Path, hidden: Path, capsys, first, then, finished: bool):
    if not finished and first:
        assert extract(config, *first) == 0
        (hidden / "manifest.json").unlink()
    elif finished:
        assert extract(config, *first) == 0
    else:
        assert killed_at(config, 8)
    before = contents(hidden)
    assert extract(config, *then) == 3
    said = {(): "None", FP8: "fp8"}
    assert f"was made with store_dtype {said[first]}, this run has {said.get(then, 'bf16')}" in capsys.readouterr().err
    assert contents(hidden) == before


def test_parts_and_their_merging_give_the_folder_of_one_job(config: Path, hidden: Path, target: Path, tmp_path: Path):
    whole = contents(hidden_of(tmp_path / "whole", target, *FP8))
    for part in ("2/2", "1/2"):
        assert extract(config, *FP8, "--extract.shard", part) == 0
    assert main(["merge", "--config", str(config), *FP8]) == 0
    assert contents(hidden) == whole


def test_a_bit_that_flipped_is_found_and_made_again(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert extract(config, *FP8) == 0
    whole, shard = contents(hidden), hidden / FILES[1]
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1  # a state
    shard.write_bytes(data)
    assert main(["verify", str(hidden)]) == 4
    assert f"{shard} is not what was written (checksum)" in capsys.readouterr().err
    assert extract(config, *FP8) == 0
    assert contents(hidden) == whole
    assert damaged(hidden) == [f"{FILES[1]}.damaged-1"]
    assert verify.contents(hidden).finished


def test_states_that_are_not_finite_are_refused_before_they_are_stored(config: Path, hidden: Path, stand_in, capsys):
    def fault(self: StandIn, captured, sample):
        if sample.sample_id == "sample-3":
            captured.states_LSH[2][5, 1] = float("inf")
        return captured

    stand_in.fault = fault
    assert extract(config, *FP8) == 4
    assert "sample sample-3: states of layer 5 are not finite from token 5 on" in capsys.readouterr().err
    assert not (hidden / "manifest.json").exists()


def test_room_is_asked_for_to_the_byte(config: Path, hidden: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """What a run took is what the next one wants, and not a byte less."""
    assert extract(config, *FP8) == 0
    shards = read_manifest(hidden, "extract").shards
    wanted = sum(shard.size_bytes for shard in shards) + 2 * space.RECORD_BYTES * len(shards)
    monkeypatch.setattr(space.os, "statvfs", lambda _: namedtuple("Blocks", "f_frsize")(1))
    shutil.rmtree(hidden)
    usage = namedtuple("Usage", "total used free")
    for free, code in ((wanted - 1, 5), (wanted, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        assert extract(config, *FP8) == code
    assert "are missing" in capsys.readouterr().err
