"""What every extraction engine offers, and which engines there are."""

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pipeline.config import Run
from pipeline.store.samples import Sample
from pipeline.target import Target

if TYPE_CHECKING:
    import torch

    from pipeline.extract.plan import Planned
    from pipeline.store import Shard

ENGINES = {
    "speculators": "pipeline.extract.speculators_engine:SpeculatorsEngine",
    "stream": "pipeline.extract.stream.engine:StreamEngine",
}
"""Module and class of each engine, imported when it is started: vLLM takes seconds to import."""


@dataclass(frozen=True)
class Captured:
    """What an engine computed for one sample: `input_ids_S` are the ids that *it* saw, int64;
    `states_LSH` one tensor [S, H] for each wanted layer id, on the CPU, in the run's dtype."""

    input_ids_S: "torch.Tensor"
    states_LSH: "list[torch.Tensor]"


class Engine(Protocol):
    """Started with (config, target, layer_ids); ids are in vLLM's serving convention, the number of layers included.

    The start raises InputError when the model cannot be loaded.
    """

    def capture(self, batches: Iterable[list[Sample]]) -> Iterator[Captured]:
        """One result a sample, in the order given. A batch holds the samples of one shard.

        A batch's states must not depend on the batches around it, so that a resumed run gives equal bytes.
        """
        ...

    def close(self) -> None:
        """End all processes and free all memory; harmless when called twice."""
        ...


@dataclass(frozen=True)
class Order:
    """What an engine that writes by itself is to make: those shards of `planned` whose file is in `files`, of the
    samples of `prepared`, in `folder`, with `run_key` in their headers and records."""

    prepared: Path
    folder: Path
    planned: "list[Planned]"
    files: list[str]
    run_key: str


@dataclass(frozen=True)
class Went:
    """What went on since the last one: `tokens` of each sample that the model has seen, shards now `written`."""

    tokens: list[int]
    written: "list[Shard]"


@runtime_checkable
class WritingEngine(Protocol):
    """An engine that writes shards where the states are; started as an Engine is."""

    def write(self, order: Order, stopping: Callable[[], bool]) -> Generator[Went]:
        """Make the shards in any order, each checked (see check.py) and with its record (see plan.py) after it. Those
        in hand when `stopping` becomes true are the last ones. A shard's bytes must not depend on the others.

        Raises InputError for states that cannot be used, OSError when the disk is full; shards that have their record
        by then stay. Left early, it ends what it began.
        """
        ...

    def close(self) -> None:
        """End all processes and free all memory; harmless when called twice."""
        ...


def start(config: Run, target: Target, layer_ids: list[int]) -> Engine | WritingEngine:
    """Load the target into the engine that `config.extract.engine` names."""
    module, _, name = ENGINES[config.extract.engine].partition(":")
    return getattr(importlib.import_module(module), name)(config, target, layer_ids)
