"""The benchmark of extract: its arithmetic, its flags, the speculators that it compares with."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import extract, models, phases, stock
from benchmarks.figures import Goal, Measured, goal_of, medians, table, told
from benchmarks.models import MODELS, Setting, count_parameters
from pipeline import patching
from pipeline.errors import InputError
from tests.contract.released import RELEASED

SETTING = Setting("tiny", prompts=5, tokens=30, batched_tokens=64, shard_tokens=60, writers=2, tensor_parallel=1,
                  dtype="float32")  # fmt: skip
SERIES = [patch.name for patch in patching.load_patch_set("speculators").patches]


# ---- Arithmetic


@pytest.mark.parametrize(
    ("prefill", "disk", "reached", "wanted", "is_reached"),
    [
        (1000.0, 2000.0, 950.0, 950.0, True),  # prefill is the lower bound
        (1000.0, 2000.0, 949.9, 950.0, False),
        (1000.0, 1000.0, 900.0, 900.0, True),  # the disk is
        (1000.0, 500.0, 449.0, 450.0, False),
    ],
)
def test_the_target_is_the_lower_of_both_bounds(
    prefill: float, disk: float, reached: float, wanted: float, is_reached: bool
) -> None:
    target = Goal(prefill, disk, reached)
    assert target.tokens_per_s == pytest.approx(wanted)
    assert target.is_reached is is_reached
    assert ("MISSED" in target.text()) is not is_reached


RUNS = [
    Measured("prefill", seconds=2.0, tokens=8000, start_s=3.0, first_s=0.1),
    Measured("stock", seconds=10.0, tokens=8000, size_bytes=4_000_000_000, files=8, start_s=4.0, first_s=1.0),
    Measured("stream-disk", seconds=4.0, tokens=8000, size_bytes=4_000_000_000, files=2, start_s=5.0, first_s=0.5),
    Measured("disk", seconds=8.0, size_bytes=10_000_000_000, files=5),
]


def test_the_disk_counts_in_states_of_tokens() -> None:
    """500,000 bytes a token, the disk takes 1.25 GB/s: 2,500 tokens."""
    target = goal_of(RUNS)
    assert target is not None
    assert target == Goal(4000.0, 2500.0, 2000.0)
    assert target.tokens_per_s == pytest.approx(2250)
    for missing in ("prefill", "stream-disk", "disk"):
        assert goal_of([run for run in RUNS if run.phase != missing]) is None


def test_the_median_of_each_phase_is_shown_with_its_spread() -> None:
    runs = [replace(RUNS[0], seconds=seconds) for seconds in (2.0, 8.0, 4.0)] + RUNS[1:]
    best = medians(runs)
    assert [(run.phase, run.seconds) for run in best] == [
        ("prefill", 4.0),
        ("stock", 10.0),
        ("stream-disk", 4.0),
        ("disk", 8.0),
    ]
    assert medians([replace(RUNS[0], seconds=seconds) for seconds in (1.0, 2.0)])[0].seconds == 2.0, "the slower one"
    lines = table(best, runs).splitlines()
    assert lines[1].split() == ["prefill", "2,000", "1.000", "0.10", "s", "-", "3.0", "s", "1,000", "to", "4,000"]
    assert lines[2].split()[:3] == ["stock", "800", "0.400"]
    assert lines[4].split() == ["disk", "-", "-", "-", "1.250", "-", "1.250", "to", "1.250"]
    assert " to " not in table(RUNS, RUNS), "one run each: no spread"
    assert told(RUNS[3]) == "disk  1.250 GB/s"


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    models.write_model(tmp_path / "model", name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    biases = [buffer for label, buffer in model.named_buffers() if "e_score_correction_bias" in label]
    assert count_parameters(MODELS[name]) == sum(each.numel() for each in [*model.parameters(), *biases])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id is not None, "stock asks for it"


def test_prompts_are_the_same_every_time_and_of_the_vocabulary() -> None:
    prompts = models.make_prompts(SETTING)
    assert prompts == models.make_prompts(SETTING)
    assert [len(ids) for ids in prompts] == [30] * 5
    assert len({tuple(ids) for ids in prompts}) == 5
    assert 0 <= min(map(min, prompts)) <= max(map(max, prompts)) < 320


def in_turns(folder: Path, names: list[str], least_bytes: int) -> list[Measured]:
    return list(phases.in_turns(names, 2, lambda _: nullcontext(str(folder)), folder, SETTING, least_bytes))


def test_the_disk_is_given_the_states_bytes_or_more(tmp_path: Path) -> None:
    measured, again = in_turns(tmp_path, ["disk"], 1)
    files = sorted(tmp_path.iterdir())
    assert SETTING.bytes_per_token == 4 * 128 * 4
    assert [file.stat().st_size for file in files] == [60 * 2048, 60 * 2048, 30 * 2048], "of a shard's size"
    assert (measured.size_bytes, measured.files, measured.tokens) == (150 * 2048, 3, 0)
    assert again.size_bytes == 150 * 2048
    assert [run.size_bytes for run in in_turns(tmp_path, ["disk"], 1_000_000)] == [1_000_000] * 2


def test_what_fails_in_a_turn_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    def fail(*_: object) -> Measured:
        raise InputError("extract: no room")

    engine = SimpleNamespace(close=lambda: closed.append("engine"))
    monkeypatch.setattr(phases, "_started_stream", lambda *_: (engine, 1.0))
    monkeypatch.setattr(phases, "_prefill", lambda *_: RUNS[0])
    monkeypatch.setattr(phases, "_stream", fail)
    runs = in_turns(tmp_path, ["prefill", "stream-disk", "disk"], 1)
    assert [run.phase for run in runs] == ["prefill", "disk"] * 2
    assert capsys.readouterr().err == "bench  stream-disk: extract: no room\n" * 2
    assert closed == ["engine"]
    assert extract._lacking(["prefill", "stream-disk", "disk"], runs, 2) == ["stream-disk"]


# ---- Stock


def test_stock_keeps_the_first_patches_of_the_series() -> None:
    """Otherwise those after them could not be taken back exactly."""
    kept = [*stock.BREAKS, *stock.FOR_THE_BENCHMARK, *stock.FOR_A_CPU]
    assert kept == SERIES[: len(kept)]
    assert len(stock.BREAKS) == 10


def test_without_any_patch_it_is_the_released_package(tmp_path: Path) -> None:
    stock.make_variant(tmp_path, keep=set())
    assert {path: patching._record_hash(tmp_path / path) for path in RELEASED} == RELEASED


def test_the_patches_taken_back_lead_to_the_installed_package(tmp_path: Path) -> None:
    keep = {*stock.BREAKS, *stock.FOR_THE_BENCHMARK}
    stock.make_variant(tmp_path, keep)
    generator = (tmp_path / "speculators/data_generation/vllm_hidden_states_generator.py").read_text()
    assert "is_encoder_decoder=False" in generator
    assert "load_format=load_format" in generator
    assert "torch.cuda.mem_get_info()" in generator, "as released"
    assert "def shutdown" not in generator
    for name in SERIES[len(keep) :]:
        patching.run_patch(tmp_path, patching.PATCHES / "speculators" / name)
    root = patching.Installed("speculators").root
    assert all((tmp_path / path).read_bytes() == (root / path).read_bytes() for path in RELEASED)


def test_a_patch_that_cannot_be_taken_back_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be made: .*rows-belong-to-requests\.patch: does not apply exactly"):
        stock.make_variant(tmp_path, {*stock.BREAKS, "workers-hear-of-finished-requests.patch", SERIES[-3], SERIES[-2]})
    with pytest.raises(InputError, match=r"has no gone\.patch"):
        stock.make_variant(tmp_path / "other", {"gone.patch"})


def test_without_gnu_patch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="GNU patch is not on PATH"):
        stock.make_variant(tmp_path, set())


# ---- Flags, and what a failing phase leaves


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--phases", "disk"], "phase disk measures a disk: give a folder on it with --disk"),
        (["--require"], "--require needs phase stream-disk as well, and --disk"),
        (["--tmpfs", "/no/such/folder"], "--tmpfs /no/such/folder is not a folder"),
        (["--model", "tiny", "--tokens", "4096"], "tiny takes prompts of 4095 tokens at most"),
        (["--tokens", "600", "--batched-tokens", "512"], "where stock loses rows"),
        (["--phases", "prefil"], "'prefil' is no phase"),
        (["--prompts", "0"], "'0' is not a whole number from 1 on"),
        (["--prompts", "some"], "'some' is not a whole number from 1 on"),
    ],
)
def test_flags_that_cannot_be_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = extract.main(flags)
    except SystemExit as stopped:  # argparse's own
        code = stopped.code
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_failing_phase_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_child(_options, names: list[str], *_: object) -> list[Measured]:
        return [run for run in RUNS if run.phase in names and run.phase != "stock"]

    monkeypatch.setattr(extract, "_in_child", in_child)
    flags = ["--model", "tiny", "--tmpfs", str(tmp_path), "--disk", str(tmp_path), "--json", str(tmp_path / "f.jsonl")]
    three = ["--phases", "prefill,stream-disk,disk"]
    assert extract.main([*flags, "--phases", "prefill,stock,stream-disk,disk"]) == 1
    assert "stock  FAILED" in capsys.readouterr().out
    assert extract.main([*flags, *three]) == 0
    assert extract.main([*flags, *three, "--require"]) == 1, "2,000 tok/s, 2,250 are the target"
    lines = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert [line["failed"] for line in lines] == [["stock"], [], []]
    assert lines[2]["target"] == {"tokens_per_s": 2250.0, "is_reached": False}
    assert [path.name for path in tmp_path.iterdir()] == ["f.jsonl"], "nothing else is left"
