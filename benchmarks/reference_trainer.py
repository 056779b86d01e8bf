"""speculators 0.9.0's trainer by its own command line, without a GPU as well.

    PYTHON reference_trainer.py ARGUMENTS OF `speculators train`

Runs under a Python that has speculators 0.9.0 and imports nothing of ours. With a GPU nothing is changed. Without one
its trainer does not start, so these are, none of which changes what is computed but for rounding:

    devices         the trainer asks for device 0, synchronises an accelerator and casts on it: all of it on the CPU
    attention       flex_attention has no backward pass on a CPU: its own option `sdpa`, document by document
    loss            its own option `eager` in the place of the one in Triton

Writes the seconds of its epochs, and versions, to the file RESULT, if that is set in the environment.
"""

import json
import os
import sys
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

FOR_A_CPU = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", "0"]


def main(arguments: list[str]) -> None:
    """Train as `speculators train` would."""
    import torch

    if not torch.cuda.is_available():
        arguments = [*arguments, *FOR_A_CPU]
        _move_to_cpu()
        _attend_by_document()
    from speculators.train.cli import main as train  # type: ignore[reportMissingImports]
    from speculators.train.config import TrainConfig  # type: ignore[reportMissingImports]

    spent = _timed_epochs()
    train(TrainConfig.resolve(arguments))
    facts = {"seconds": sum(spent), "speculators": metadata.version("speculators"), "torch": torch.__version__}
    if result := os.environ.get("RESULT"):
        Path(result).write_text(json.dumps(facts))


def _timed_epochs() -> list[float]:
    """Seconds of each epoch that will have been trained, without its validation and checkpoint."""
    from speculators.train.trainer import Trainer  # type: ignore[reportMissingImports]

    seconds, train_epoch = [], Trainer.train_epoch

    def timed(self: Any, *arguments: Any, **named: Any) -> None:
        begun = time.perf_counter()
        train_epoch(self, *arguments, **named)
        seconds.append(time.perf_counter() - begun)

    Trainer.train_epoch = timed
    return seconds


def _move_to_cpu() -> None:
    import torch
    from speculators.train.trainer import Trainer, _StepTimer  # type: ignore[reportMissingImports]

    set_up = Trainer.setup_trainer

    def setup_trainer(self: Any) -> None:
        self.local_rank, self.device_type = torch.device("cpu"), "cpu"
        set_up(self)

    Trainer.setup_trainer = setup_trainer
    _StepTimer.reset = lambda self, enabled: None  # its clock needs a device to wait for


def _attend_by_document() -> None:
    """The mask lets a query see its own document and, of later TTT steps, its own key: so each document is a product of
    its own, with its part of the mask. Of padding, which is compared with nothing, the values are 0."""
    import torch
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS  # type: ignore[reportMissingImports]
    from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[reportMissingImports]

    build, documents = Eagle3DraftModel._build_attn_mask, []

    def remember(self: Any, doc_ids_1d: Any, *more: Any, **named: Any) -> Any:
        documents[:] = ranges(doc_ids_1d.tolist())
        return build(self, doc_ids_1d, *more, **named)

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Any, None]:
        mixed, length = torch.zeros_like(query), query.shape[2]
        steps = key.shape[2] // length
        for start, end in documents:
            columns = torch.cat([torch.arange(start, end) + step * length for step in range(steps)])
            mixed[:, :, start:end] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, columns],
                value[:, :, columns],
                attn_mask=attention_mask[:, :, start:end][..., columns],
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return mixed.transpose(1, 2).contiguous(), None

    Eagle3DraftModel._build_attn_mask = remember
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def ranges(document_ids: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of equal ids but -1, which is padding."""
    borders = [i for i, (a, b) in enumerate(zip([None, *document_ids], [*document_ids, None], strict=True)) if a != b]
    return [(a, b) for a, b in pairwise(borders) if document_ids[a] != -1]


if __name__ == "__main__":
    main(sys.argv[1:])
