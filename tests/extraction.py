"""The step extract with a stand-in for its engine, for tests of all that is not the engine; and, for every engine,
processes that kill themselves at a named point."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from pipeline.__main__ import main
from pipeline.extract import step
from pipeline.extract.engines import Captured
from pipeline.extract.stream import writer
from pipeline.store import atomic
from pipeline.store.samples import Sample
from tests.runs import ended, in_child

HIDDEN, NUM_LAYERS = 16, 8
LENGTHS = [30, 1, 50, 20, 45, 60, 5, 5]
SHARD_TOKENS = 60
FILES = [f"shard-{n:05d}.safetensors" for n in range(6)]
MANIFEST = "manifest.json"


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


class Slow(StandIn):
    """A stand-in that takes its time, so that there is a moment to end it in."""

    def fault(self, captured: Captured, sample: Sample) -> Captured:
        time.sleep(0.002)
        return captured


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


POINTS = [
    "while states are computed",
    "in the middle of the temporary file",
    "after the temporary file",
    "before the rename",
    "before the record",
    "after the record",
    "before the manifest",
    "after the manifest",
]
"""Moments of the third shard, and of the end."""


def killed_in(config: Path, point: str) -> None:
    """Run the step in a child that kills itself at one of POINTS."""

    def work() -> int:
        arm(point)
        return extract(config)

    assert ended(in_child(work)) == -signal.SIGKILL, f"not killed {point}"


def arm(point: str) -> None:
    """In the process to be killed, whatever its engine: replace what `point` names by something that kills it there."""
    sync, write = atomic.sync, os.write
    before = {"before the rename": FILES[2], "before the record": "shard-00002.json", "before the manifest": MANIFEST}
    after = {"after the record": "shard-00002.json", "after the manifest": MANIFEST}

    def sync_or_die(path: Path) -> None:
        if path.name == f".{FILES[2]}.tmp":
            kill_myself()
        sync(path)

    def write_half(file: int, data: memoryview) -> int:
        is_its = Path(f"/proc/self/fd/{file}").readlink().name == f".{FILES[2]}.tmp"
        if is_its and os.lseek(file, 0, os.SEEK_CUR):  # beyond the header
            write(file, data[: len(data) // 2])
            kill_myself()
        return write(file, data)

    if point in before:
        around_rename(before[point], kill_myself, before=True)
    elif point in after:
        around_rename(after[point], kill_myself, before=False)
    elif point == "after the temporary file":
        atomic.sync = sync_or_die
    elif point == "in the middle of the temporary file":
        os.write = write_half
    else:
        assert point == "while states are computed", point
        on_states_of("sample-3", kill_myself)


def around_rename(name: str, act: Callable[[], None], *, before: bool) -> None:
    """`act` when a temporary file takes the name `name`, before or after that."""
    rename = os.replace

    def replace(source, destination, **keywords):
        its = Path(destination).name == name
        if its and before:
            act()
        rename(source, destination, **keywords)
        if its and not before:
            act()

    os.replace = replace


def on_states_of(sample_id: str, act: Callable[[], None]) -> None:
    """`act` when states of a sample come from the model: at the step, or at the threads of the engine `stream`."""
    check, take = step.check_captured, writer.OpenShard.take

    def check_or_act(sample: Sample, *arguments) -> None:
        if sample.sample_id == sample_id:
            act()
        check(sample, *arguments)

    def take_or_act(self: writer.OpenShard, number: int, *arguments) -> None:
        if self.samples[number].sample_id == sample_id:
            act()
        take(self, number, *arguments)

    step.check_captured = check_or_act
    writer.OpenShard.take = take_or_act  # type: ignore[method-assign]
