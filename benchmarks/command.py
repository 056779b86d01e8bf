"""What the benchmarks' command lines share: how help is shown, how numbers are read, what is said of the machine."""

import argparse
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import __version__, engine
from pipeline.errors import InputError
from pipeline.preflight.gpus import read_gpus


class Formatter(argparse.RawDescriptionHelpFormatter):
    """The description as it is written; defaults after the flags that have one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default and action.default != argparse.SUPPRESS
        return (action.help or "") + (f" (default: {action.default})" if shown else "")


def count(text: str) -> int:
    """A flag's whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def machine() -> dict[str, Any]:
    """GPUs, processor and versions, for programs."""
    gpus = read_gpus()
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "gpu": gpus.visible[0].name if gpus.visible else None,
        "gpus": len(gpus.visible),
        "driver": gpus.driver or None,
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "aerie": __version__,
        "vllm": _vllm(),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _vllm() -> str | None:
    """None in an environment without it: training needs none."""
    try:
        return engine.version()
    except InputError:
        return None


def _cpu_lines() -> Iterator[str]:
    path = Path("/proc/cpuinfo")
    yield from path.read_text().splitlines() if path.is_file() else ()
