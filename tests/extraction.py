"""The step extract with a stand-in for its engine: for tests of all that is not the engine."""

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from pipeline.__main__ import main
from pipeline.extract.engines import Captured
from pipeline.store.samples import Sample

HIDDEN, NUM_LAYERS = 16, 8
LENGTHS = [30, 1, 50, 20, 45, 60, 5, 5]
SHARD_TOKENS = 60
FILES = [f"shard-{n:05d}.safetensors" for n in range(6)]


class StandIn:
    """An engine whose states are a function of the ids; `fault` may change a result."""

    started = 0
    closed = 0

    def __init__(self, config, target, layer_ids: list[int]):
        type(self).started += 1
        self.layer_ids = layer_ids

    def capture(self, batches: Iterable[list[Sample]]) -> Iterator[Captured]:
        for batch in batches:
            for sample in batch:
                ids_S = torch.from_numpy(sample.input_ids_S.astype(np.int64))
                states = [torch.sin(ids_S[:, None] * (layer + 1.0) + torch.arange(HIDDEN)) for layer in self.layer_ids]
                yield self.fault(Captured(ids_S, states), sample)

    def fault(self, captured: Captured, sample: Sample) -> Captured:
        return captured

    def close(self) -> None:
        type(self).closed += 1


def extract(config: Path, *flags: str) -> int:
    """The step from the command line; its exit code."""
    return main(["extract", "--config", str(config), *flags])


def killed_at(config: Path, event: int) -> bool:
    """Run the step in a child that kills itself at its `event`-th rename, before or after it. False: it finished."""
    child = os.fork()
    if not child:
        events = iter(range(10**6))
        rename = os.replace

        def rename_or_die(*arguments, **keywords):
            if next(events) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*arguments, **keywords)
            if next(events) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = rename_or_die
        os._exit(extract(config))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
