"""Memory of one GPU in training: the trainer itself, run for two steps and a validation on tensors without data.

What it counts is the largest that the configuration allows: rows that are full, of the longest samples, every token
supervised. It follows pipeline.train: nothing of the draft's or the loss's structure is repeated here.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pipeline.config import Run
from pipeline.forecast.engine_memory import GIB
from pipeline.forecast.ledger import Ledger
from pipeline.store.dtypes import is_encoded, stored_dtype
from pipeline.target import Head, Target
from pipeline.train.checkpoint import Progress
from pipeline.train.data import Row, empty_row, row_bytes, without_data
from pipeline.train.draft import Draft, draft_config
from pipeline.train.loop import Place, Trainer
from pipeline.train.loss import TargetHead, frozen_dtype
from pipeline.train.optimizer import MuonAndAdamW, moments_bytes, shared_out

CUBLAS_WORKSPACE_BYTES = 32 << 20
"""What PyTorch gives cuBLAS on Hopper and later (aten/cuda/CUDABlas, CUBLAS_WORKSPACE_CONFIG's default)."""
AUX_LAYERS = 3
"""Whose states an EAGLE-3 draft takes."""
STEPS = 2
"""The second one holds the optimiser's state from its start."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one GPU when most is held. `parameters`, `trainable` and, of these, `output_rows` and
    `matrices` count the draft's weights, not bytes."""

    weights: int
    gradients: int
    optimizer: int
    target: int
    """The frozen embedding, the target's norm and output rows."""
    activations: int
    """The batch, what the backward pass needs, its own intermediate tensors and cuBLAS's workspace."""
    buckets: int
    """What several processes exchange gradients in: with DistributedDataParallel a second copy of them; sharded, see
    `sharded_memory`."""
    parameters: int
    trainable: int
    output_rows: int
    moments: int
    """Of the optimiser, each counted once: every replica has all of AdamW's, and some of Muon's."""
    matrices: int
    """Weights that Muon steps."""

    @property
    def total(self) -> int:
        """What `torch.cuda.max_memory_allocated` will say."""
        return self.weights + self.gradients + self.optimizer + self.target + self.activations + self.buckets


class FullRows:
    """Stands in for pipeline.train.data.Rows: every row is full, of the longest samples that fit."""

    def __init__(self, rows: int, row_tokens: int, sample_tokens: int, hidden_size: int, dtype: torch.dtype):
        self.rows, self.row_tokens, self.hidden_size, self.dtype = rows, row_tokens, hidden_size, dtype
        starts = range(0, row_tokens, sample_tokens)
        self.documents = [(start, min(start + sample_tokens, row_tokens)) for start in starts]
        self.reader: Any = self  # the trainer asks it for lengths and names
        self.lengths_N, self.sample_ids = np.array([row_tokens] * rows), [f"row {n}" for n in range(rows)]

    def steps_in(self, epoch: int) -> int:
        """Optimiser steps of an epoch."""
        return STEPS

    def of_step(self, epoch: int, step: int, rank: int, world: int) -> list[list[int]]:
        """This process's rows of a step."""
        return [[n] for n in range(self.rows)]

    def room(self, *, stored: bool = False, pinned: bool = False) -> Row:
        """Memory for a row; states are stored as they are."""
        return empty_row(self.row_tokens, AUX_LAYERS, self.hidden_size, self.dtype, pinned)

    def load(self, row: list[int], room: Row | None = None) -> Row:
        """One row."""
        return without_data(room or self.room(), self.documents)


def training_memory(config: Run, target: Target, processes: int) -> TrainingMemory:
    """Memory of one of `processes` GPUs. Takes seconds and no memory; needs the target's config.json, no weights."""
    section = config.train.model_copy(update={"epochs": 1, "checkpoint_steps": STEPS, "prefetch_rows": 0})
    words = min(config.vocab.draft_vocab_size, target.vocab_size)
    aux_layers = target.aux_layers(config.extract.aux_layers)
    with warnings.catch_warnings(), Ledger() as ledger:
        warnings.simplefilter("ignore")  # PyTorch's, about what has no meaning without data
        dtype = frozen_dtype(target.dtype, section.autocast)
        head = _head(target, dtype)
        draft = Draft(draft_config(target, section, aux_layers, words), head.embedding_VH)
        teacher = TargetHead(head, torch.zeros(words, dtype=torch.long), torch.device("cpu"), dtype)
        rows: Any = FullRows(
            -(-section.rows_per_step // processes),
            section.tokens_per_row,
            config.target.max_length,
            target.hidden_size,
            target.dtype,
        )
        draft.flex = True  # as on a GPU
        trainer = Trainer(draft, teacher, rows, rows, section, Place(0, 1, torch.device("cpu")), 0)
        ledger.mark("weights", draft.parameters())
        ledger.mark("target", [draft.embedding_VH, *(v for v in vars(teacher).values() if isinstance(v, torch.Tensor))])
        trainer.optimizer.register_step_post_hook(lambda *_: _mark_trained(ledger, trainer))
        trainer.run(Progress(), lambda _: None, lambda *_: None)
    next_row = _next_row_bytes(config, target)
    matrices = list(trainer.optimizer.matrices) if isinstance(trainer.optimizer, MuonAndAdamW) else []
    held, sizes = ledger.at_peak(), [p.numel() for p in draft.parameters() if p.requires_grad]
    return TrainingMemory(
        weights=held.get("weights", 0),
        gradients=held.get("gradients", 0),
        optimizer=held.get("optimizer", 0) - _kept_elsewhere(matrices, processes),
        target=held.get("target", 0),
        activations=held.get("activations", 0) + CUBLAS_WORKSPACE_BYTES + next_row,
        buckets=4 * sum(sizes) if processes > 1 else 0,
        parameters=sum(p.numel() for p in draft.parameters()),
        trainable=sum(sizes),
        output_rows=draft.lm_head.weight.numel() if section.train_lm_head else 0,
        moments=moments_bytes(trainer.optimizer),
        matrices=sum(matrix.numel() for matrix in matrices),
    )


def _kept_elsewhere(matrices: list[torch.Tensor], processes: int) -> int:
    """Bytes of Muon's moments that the process with the most of them has not."""
    sizes, each = [4 * matrix.numel() for matrix in matrices], [0] * processes
    for size, owner in zip(sizes, shared_out(matrices, processes), strict=True):
        each[owner] += size
    return sum(sizes) - max(each)


def fits(memory: TrainingMemory, config: Run, gpu_bytes: float) -> bool:
    """Whether a GPU has it, forecast.gpu_overhead_gib left free."""
    return memory.total + config.forecast.gpu_overhead_gib * GIB <= gpu_bytes


def sharded_memory(replica: TrainingMemory, processes: int) -> TrainingMemory:
    """The same where each process keeps a part (pipeline.train.sharding).

    Beside the parts a step holds all weights once, with gradients and activations. An exchange, of weights before or
    of gradients after these, holds what it sends and a buffer of that size: `buckets` is what that takes more, if any.
    """
    weights, more = replica.weights, replica.gradients + replica.activations
    return replace(
        replica,
        weights=weights + weights // processes,
        optimizer=replica.moments // processes,
        buckets=max(0, weights + replica.buckets // processes - more),
    )


def _next_row_bytes(config: Run, target: Target) -> int:
    """The row that is copied to the GPU while another is computed on (pipeline.train.loader); as it is stored,
    too, where it is decoded there."""
    if config.train.prefetch_rows == 0:
        return 0
    sizes = config.train.tokens_per_row, AUX_LAYERS, target.hidden_size
    dtype, store_dtype = config.target.dtype, config.extract.store_dtype
    as_stored = row_bytes(*sizes, stored_dtype(dtype, store_dtype)) if is_encoded(dtype, store_dtype) else 0
    return as_stored + row_bytes(*sizes, stored_dtype(dtype, None))


def _head(target: Target, dtype: torch.dtype) -> Head:
    """As Target.head, without data. On a GPU tied embedding and output rows are two copies, so here."""
    shape = (target.vocab_size, target.hidden_size)
    eps = target.number("rms_norm_eps")
    return Head(torch.zeros(shape, dtype=dtype), torch.zeros(target.hidden_size), torch.zeros(shape, dtype=dtype), eps)


def _mark_trained(ledger: Ledger, trainer: Trainer) -> None:
    """After a step: the gradients that it used and the moments that it keeps."""
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    ledger.mark("gradients", [p.grad for p in trained if p.grad is not None])
    ledger.mark("optimizer", [v for p in trained for v in trainer.optimizer.state[p].values()])
