"""The benchmark of extract, all phases on the real vLLM: a tiny model, a few prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.extract import ALL
from pipeline.store.states import shard_bytes

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
PROMPTS, TOKENS, SHARD_TOKENS, HIDDEN = 20, 40, 320, 128


def test_every_phase_is_measured(tmp_path: Path) -> None:
    tmpfs, disk = tmp_path / "tmpfs", tmp_path / "disk"
    tmpfs.mkdir()
    disk.mkdir()
    flags = f"--model tiny --prompts {PROMPTS} --tokens {TOKENS} --batched-tokens 256 --shard-tokens {SHARD_TOKENS}"
    places = ["--tmpfs", str(tmpfs), "--disk", str(disk), "--disk-gb", "0.01", "--json", str(tmp_path / "f.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.extract", *flags.split(), *places],
        cwd=ROOT, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stock runs 6 prompts a batch, not 8" in done.stderr
    rows = {row.split()[0]: row.split() for row in done.stdout.splitlines()[3:] if row}
    assert list(rows) == ["phase", *ALL, "to"]
    assert rows["prefill"][2] == "1.000"
    facts = json.loads((tmp_path / "f.jsonl").read_text())
    assert facts["failed"] == []
    measured = facts["medians"]
    assert list(measured) == list(ALL)
    _check_counts(measured)
    assert facts["target"]["tokens_per_s"] == pytest.approx(
        min(
            0.95 * measured["prefill"]["tokens_per_s"],
            0.9 * measured["disk"]["gb_per_s"] * 1e9 / (_hidden_bytes() / (PROMPTS * TOKENS)),
        )
    )
    assert not [*tmpfs.iterdir(), *disk.iterdir()], "nothing is left"


def _check_counts(measured: dict) -> None:
    for name in ("prefill", "stock", "stream-tmpfs", "stream-disk"):
        one = measured[name]
        assert one["tokens"] == PROMPTS * TOKENS
        assert 0 < one["tokens_per_s"] < 1e6
        assert 0 < one["first_s"] <= one["seconds"] + 0.001
        assert one["start_s"] > 0
    states = PROMPTS * TOKENS * 4 * HIDDEN * 4
    assert states < measured["stock"]["size_bytes"] < 1.2 * states, "four layers of every token"
    assert measured["stock"]["files"] == PROMPTS
    for name in ("stream-tmpfs", "stream-disk"):
        assert measured[name]["size_bytes"] == _hidden_bytes()
        assert measured[name]["files"] == 3
    assert measured["disk"]["size_bytes"] == 10_000_000, "more than the states"


def _hidden_bytes() -> int:
    """Of the shards of hidden/: 8, 8 and 4 samples; every sample has two names of 13 letters."""
    per_shard = SHARD_TOKENS // TOKENS
    counts = [min(per_shard, PROMPTS - first) for first in range(0, PROMPTS, per_shard)]
    form = {"aux_layers": [2, 4, 5], "last_layer": 8, "hidden_size": HIDDEN, "item_bytes": 4}
    return sum(shard_bytes(count, count * TOKENS, count * 2 * len("sample-000000"), **form) for count in counts)
