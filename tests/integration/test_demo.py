"""The whole chain on the engine by one command, on a tiny model: what `make demo` does on a real one."""

import json
import subprocess
import sys
from pathlib import Path

from tests.training import write_config

ROOT = Path(__file__).parents[2]


def demo(path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pipeline", "demo", "--config", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)


def test_demo_makes_a_draft_says_what_it_is_worth_and_does_nothing_twice(tmp_path, llama_folder):
    for name in ("train", "heldout"):
        rows = [{"prompt": f"{name}: what is {n} and {n * n}?"} for n in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_config(
        tmp_path / "run.toml",
        llama_folder,
        prepare={"sources": [str(tmp_path / "train.jsonl")], "max_new_tokens": 24},
        train={"epochs": 2, "learning_rate": 1e-3, "validation_share": 0.2},
        evaluate={"prompts": [str(tmp_path / "heldout.jsonl")], "max_new_tokens": 16},
    )
    done = demo(path)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "test"
    for folder in ("prepared", "hidden", "vocab", "checkpoints", "evaluation"):
        assert (run / folder / "manifest.json").is_file(), folder
        assert str(run / folder) in done.stdout
    assert "12 held-out prompts, reference engine" in done.stdout
    written = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file() and file.name != ".lock"}

    again = demo(path)
    assert again.returncode == 0
    assert again.stdout.count("already done") == 5
    assert {file: file.stat().st_mtime_ns for file in written} == written


def test_demo_ends_with_the_code_of_the_step_that_fails(tmp_path, llama_folder):
    path = write_config(tmp_path / "run.toml", llama_folder)
    done = demo(path)
    assert done.returncode == 4
    assert "source none.jsonl does not exist" in done.stderr
    assert "Traceback" not in done.stderr
