"""What every extraction engine offers, and which engines there are."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.config import Run
from pipeline.store.samples import Sample
from pipeline.target import Target

if TYPE_CHECKING:
    import torch

ENGINES = {"speculators": "pipeline.extract.speculators_engine:SpeculatorsEngine"}
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


def start(config: Run, target: Target, layer_ids: list[int]) -> Engine:
    """Load the target into the engine that `config.extract.engine` names."""
    module, _, name = ENGINES[config.extract.engine].partition(":")
    return getattr(importlib.import_module(module), name)(config, target, layer_ids)
