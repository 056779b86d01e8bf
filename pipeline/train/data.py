"""Samples packed into rows of a fixed length, in an order that only the seed and the epoch decide.

A row holds whole samples; nothing is cut. Which rows make up step n does not depend on the number of
processes, so that two processes see what one would, and a stopped run goes on where it was.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import InputError
from pipeline.store.dtypes import Stored
from pipeline.store.encoding import FP8, decode
from pipeline.store.states import StatesReader

PADDING = -1
"""Document id of the unused end of a row."""


@dataclass
class Row:
    """R tokens, several samples one after the other, the rest padding.

    `supervised_R[j]` is true where the token after j, in the same sample, is one of the target's own words.
    """

    tokens_R: Tensor
    positions_R: Tensor
    document_R: Tensor
    supervised_R: Tensor
    aux_RLH: Tensor
    last_RH: Tensor
    documents: list[tuple[int, int]]
    aux_scales_RL: Tensor | None = None
    """With `last_scales_R`, of states that are as they were stored in fp8: see `decoded`."""
    last_scales_R: Tensor | None = None

    def to(self, device: torch.device) -> "Row":
        """The same row on a device. To a GPU the copies are only begun; from one they are done."""
        begun = device.type != "cpu"
        moved = {k: v.to(device, non_blocking=begun) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Row(**moved, documents=self.documents)

    def decoded(self, dtype: torch.dtype) -> "Row":
        """The same row with states of `dtype`, if they are as they were stored."""
        if self.aux_RLH.dtype == dtype:
            return self
        aux_RLH = decode(self.aux_RLH, self.aux_scales_RL, dtype)
        last_RH = decode(self.last_RH, self.last_scales_R, dtype)
        return replace(self, aux_RLH=aux_RLH, last_RH=last_RH, aux_scales_RL=None, last_scales_R=None)


def split_by_conversation(conversation_ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices for training and for validation; all samples of a conversation are on one side.

    `share` is that of conversations; at least one when it is above 0 and there are two or more.
    """
    names = sorted(set(conversation_ids))
    count = min(math.ceil(share * len(names)), len(names) - 1)
    held_back = {names[i] for i in np.random.default_rng(seed).permutation(len(names))[:count]}
    train = [i for i, name in enumerate(conversation_ids) if name not in held_back]
    return train, [i for i, name in enumerate(conversation_ids) if name in held_back]


def pack(samples: list[int], lengths_N: np.ndarray, row_length: int, seed: tuple[int, ...]) -> list[list[int]]:
    """Rows of sample indices: samples in seeded random order, each into the first open row that has room.

    Raises InputError for a sample longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for i in (samples[j] for j in np.random.default_rng(seed).permutation(len(samples))):
        length = int(lengths_N[i])
        if length > row_length:
            raise InputError(
                f"train: a sample has {length} tokens, a row {row_length}. "
                f"Set train.tokens_per_row to {length} or more, or target.max_length to {row_length} and prepare again"
            )
        place = next((r for r in range(first_open, len(rows)) if room[r] >= length), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(row_length)
        rows[place].append(i)
        room[place] -= length
        first_open = max(first_open, len(rows) - 64)  # first fit over the newest 64 rows: linear time, 1-3 % padding
    return rows


class Rows:
    """The rows of each epoch and step, read from `hidden/` when asked for."""

    def __init__(self, reader: StatesReader, samples: list[int], row_length: int, seed: int, rows_per_step: int):
        self.reader, self.samples, self.row_length = reader, samples, row_length
        self.seed, self.rows_per_step = seed, rows_per_step
        self._epochs: dict[int, list[list[int]]] = {}

    def of_epoch(self, epoch: int) -> list[list[int]]:
        """All rows of an epoch, as sample indices."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # the trainer is in one while the next one's first rows are read already
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = pack(self.samples, self.reader.lengths_N, self.row_length, (self.seed, epoch))
        return self._epochs[epoch]

    def steps_in(self, epoch: int) -> int:
        """Optimiser steps of an epoch; the last one may hold fewer rows."""
        return math.ceil(len(self.of_epoch(epoch)) / self.rows_per_step)

    def of_step(self, epoch: int, step: int, rank: int, world: int) -> list[list[int]]:
        """This process's rows of a step; empty rows fill up, so that every process has equally many."""
        rows = self.of_epoch(epoch)[step * self.rows_per_step : (step + 1) * self.rows_per_step]
        rows += [[]] * (-len(rows) % world)
        return rows[rank::world]

    def load(self, row: list[int], room: Row | None = None) -> Row:
        """Read a row's samples and lay them out, in `room` where one is given."""
        return lay_out(self.reader, row, room or self.room())

    @property
    def dtype(self) -> torch.dtype:
        """Of a row's states."""
        return getattr(torch, self.reader.manifest.totals["dtype"])

    def room(self, *, stored: bool = False, pinned: bool = False) -> Row:
        """Memory for a row: `row_bytes` of it. `stored`: for states as they are stored, to be `decoded` later.
        `pinned`: a GPU copies from it while everything else goes on."""
        totals, dtype = self.reader.manifest.totals, self.reader.stored if stored else self.dtype
        return empty_row(self.row_length, len(totals["aux_layers"]), totals["hidden_size"], dtype, pinned)


def empty_row(tokens: int, layers: int, hidden: int, dtype: torch.dtype, pinned: bool = False) -> Row:
    """A row of `tokens` with nothing in it yet, not even zeros. Of fp8, with room for scales."""

    def empty(*shape: int, of: torch.dtype = torch.long) -> Tensor:
        return torch.empty(shape, dtype=of, pin_memory=pinned)

    return Row(
        empty(tokens),
        empty(tokens),
        empty(tokens),
        empty(tokens, of=torch.bool),
        empty(tokens, layers, hidden, of=dtype),
        empty(tokens, hidden, of=dtype),
        [],
        empty(tokens, layers, of=torch.float32) if dtype == FP8 else None,
        empty(tokens, of=torch.float32) if dtype == FP8 else None,
    )


def without_data(room: Row, documents: list[tuple[int, int]]) -> Row:
    """A full row of these documents, all of it supervised and zeros: what takes most to compute."""
    row = replace(room, documents=documents)
    for values in (row.tokens_R, row.aux_RLH, row.last_RH):
        values.zero_()
    row.supervised_R.fill_(True)
    for number, (start, end) in enumerate(documents):
        row.positions_R[start:end] = torch.arange(end - start)
        row.document_R[start:end] = number
    return row


def row_bytes(tokens: int, layers: int, hidden: int, stored: Stored) -> int:
    """What a row takes: its states, and 25 bytes a token for ids, positions, documents, mask."""
    return sum(_parts_bytes(tokens, layers, hidden, stored))


def pinned_row_bytes(tokens: int, layers: int, hidden: int, stored: Stored) -> int:
    """What it takes in pinned memory: PyTorch rounds each tensor's up to a power of two (CachingHostAllocator.h)."""
    return sum(1 << (size - 1).bit_length() for size in _parts_bytes(tokens, layers, hidden, stored) if size)


def _parts_bytes(tokens: int, layers: int, hidden: int, stored: Stored) -> list[int]:
    """Of a row's tensors, in their order."""
    state, scale = tokens * hidden * stored.item_bytes, tokens * stored.scale_bytes
    return [8 * tokens, 8 * tokens, 8 * tokens, tokens, layers * state, state, layers * scale, scale]


def lay_out(reader: StatesReader, samples: list[int], room: Row) -> Row:
    """Read samples into `room`, one after the other, the rest padding. Raises InputError, naming sample and file."""
    row = Row(**{**vars(room), "documents": []})
    start = 0
    for number, index in enumerate(samples):
        size = int(reader.lengths_N[index])
        place = slice(start, start + size)
        scales = None
        if row.aux_scales_RL is not None and row.last_scales_R is not None:
            scales = row.aux_scales_RL[place], row.last_scales_R[place]
        input_ids_S, loss_mask_S = reader.read_into(index, row.aux_RLH[place], row.last_RH[place], scales)
        row.tokens_R[place] = input_ids_S
        row.positions_R[place] = torch.arange(size)
        row.document_R[place] = number
        row.supervised_R[start : start + size - 1] = loss_mask_S[1:]
        row.supervised_R[start + size - 1] = False
        row.documents.append((start, start + size))
        start += size
    for name, values in vars(row).items():
        if isinstance(values, Tensor):
            values[start:] = PADDING if name == "document_R" else 0
    if not samples:  # attention needs a document: one token of padding, in which nothing is supervised
        row.documents.append((0, 1))
    return row
