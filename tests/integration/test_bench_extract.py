"""The benchmark of extract, every phase on the real vLLM: a tiny model, a few prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import engine
from pipeline.store.states import shard_bytes

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
PROMPTS, TOKENS, SHARD_TOKENS, HIDDEN = 20, 40, 320, 128
DTYPE, ITEM_BYTES = ("float32", 4) if engine.on_cpu() else ("bfloat16", 2)
STOCK, OTHERS = "stock", "prefill,stream-tmpfs,stream-disk,disk"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """The command twice, side by side for the sake of time: stock, which takes half of it, and the other phases."""
    folder = tmp_path_factory.mktemp("bench")
    started = {phases: _start(folder, phases) for phases in (STOCK, OTHERS)}
    return {phases: _ended(*one) for phases, one in started.items()}


def _start(folder: Path, phases: str) -> tuple[Path, subprocess.Popen[str]]:
    place = folder / phases
    for name in ("tmpfs", "disk"):
        (place / name).mkdir(parents=True)
    flags = f"--model tiny --prompts {PROMPTS} --tokens {TOKENS} --batched-tokens 256 --shard-tokens {SHARD_TOKENS}"
    places = f"--tmpfs {place}/tmpfs --disk {place}/disk --disk-gb 0.01 --json {place}/f.jsonl --phases {phases}"
    command = [sys.executable, "-m", "benchmarks.extract", *flags.split(), *places.split()]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return place, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def _ended(place: Path, process: subprocess.Popen[str]) -> SimpleNamespace:
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert not [*(place / "tmpfs").iterdir(), *(place / "disk").iterdir()], "something is left"
    facts = json.loads((place / "f.jsonl").read_text())
    assert facts["failed"] == []
    rows = {row.split()[0]: row.split() for row in out.splitlines()[3:] if row}
    return SimpleNamespace(measured=facts["medians"], target=facts["target"], rows=rows, err=err)


def test_stock_saves_four_layers_of_every_token(runs: dict[str, SimpleNamespace]) -> None:
    run = runs[STOCK]
    assert list(run.rows) == ["phase", "stock"]
    assert "stock runs 6 prompts a batch, not 8" in run.err
    one = run.measured["stock"]
    _check_rates(one)
    states = PROMPTS * TOKENS * 4 * HIDDEN * ITEM_BYTES
    assert states < one["size_bytes"] < 1.2 * states
    assert one["files"] == PROMPTS


def test_the_other_phases_and_the_target(runs: dict[str, SimpleNamespace]) -> None:
    run = runs[OTHERS]
    assert list(run.rows) == ["phase", *OTHERS.split(","), "to"]
    assert run.rows["prefill"][2] == "1.000"
    prefill, tmpfs, disk, alone = (run.measured[name] for name in OTHERS.split(","))
    for one in (prefill, tmpfs, disk):
        _check_rates(one)
    assert prefill["size_bytes"] == 0
    assert tmpfs["size_bytes"] == disk["size_bytes"] == _hidden_bytes()
    assert tmpfs["files"] == disk["files"] == 3
    assert alone["size_bytes"] == 10_000_000, "more than the states"
    sustained = alone["gb_per_s"] * 1e9 / (_hidden_bytes() / (PROMPTS * TOKENS))
    wanted = min(0.95 * prefill["tokens_per_s"], 0.9 * sustained)
    assert run.target == {"tokens_per_s": pytest.approx(wanted), "is_reached": disk["tokens_per_s"] >= wanted}


def _check_rates(one: dict) -> None:
    assert one["tokens"] == PROMPTS * TOKENS
    assert 0 < one["tokens_per_s"] < 1e6
    assert 0 < one["first_s"] <= one["seconds"] + 0.001
    assert one["start_s"] > 0


def _hidden_bytes() -> int:
    """Of the shards of hidden/: 8, 8 and 4 samples; every sample has two names of 13 letters."""
    per_shard = SHARD_TOKENS // TOKENS
    counts = [min(per_shard, PROMPTS - first) for first in range(0, PROMPTS, per_shard)]
    form = {"aux_layers": [2, 4, 5], "last_layer": 8, "hidden_size": HIDDEN, "dtype": DTYPE}
    return sum(shard_bytes(count, count * TOKENS, count * 2 * len("sample-000000"), **form) for count in counts)
