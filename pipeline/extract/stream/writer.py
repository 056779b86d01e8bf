"""Threads of the worker: rows into their samples' places, samples checked, shards written.

One thread empties the ring: it copies a step's rows into the shards that they belong to, in any order of requests,
each row once. Writers check a shard when its last row has come, write it, and write its record after it. The first
error stops the writing; the ring is emptied still, so that the model never waits for what is dead, until the driver
has asked.

S tokens of a sample, T of a shard, N of a step, L captured layers, H hidden size
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from pipeline.extract.check import FAULT, check_captured
from pipeline.extract.engines import Captured
from pipeline.extract.plan import Planned, record, remaining
from pipeline.extract.stream.ring import Ring, Slot
from pipeline.extract.stream.work import Report, Work, request_place, tell
from pipeline.store.samples import Sample
from pipeline.store.states import write_states


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in a step: `rows` of them from `row` on, for its tokens from `position` on."""

    request: str
    position: int
    row: int
    rows: int


@dataclass(frozen=True)
class Step:
    """A step that ran: its states, the token ids that the model was given, and whose rows they are."""

    slot: Slot
    ids_N: torch.Tensor
    chunks: list[Chunk]


Memory = tuple[torch.Tensor, torch.Tensor]
"""Of the largest shard: aux states [T, L - 1, H] and last states [T, H]."""


class OpenShard:
    """A shard that is being filled, in memory that is used again for later ones."""

    def __init__(self, planned: Planned, samples: list[Sample], memory: Memory):
        self.planned, self.samples, self.memory = planned, samples, memory
        self.aux_TLH, self.last_TH = (states[: planned.tokens] for states in memory)
        self.ids_T = torch.empty(planned.tokens, dtype=torch.int64)
        self._offsets = np.cumsum([0, *(len(sample.input_ids_S) for sample in samples)]).tolist()
        self._filled = [0] * len(samples)
        self._missing = planned.tokens

    @property
    def is_full(self) -> bool:
        return not self._missing

    def rows_of(self) -> Iterator[tuple[Sample, slice]]:
        """Each sample with its rows."""
        for sample, (begin, end) in zip(self.samples, pairwise(self._offsets), strict=True):
            yield sample, slice(begin, end)

    def lacks(self) -> str:
        """The first sample that is not complete."""
        for sample, have in zip(self.samples, self._filled, strict=True):
            if have < len(sample.input_ids_S):
                return f"sample {sample.sample_id}: {have} of {len(sample.input_ids_S)} rows came"
        return f"{self.planned.file} has all its rows"

    def take(self, number: int, chunk: Chunk, step: Step) -> None:
        """Put a chunk's rows in their places. Rows that were there already are left alone: a preempted request is
        computed again from its first token. Raises RuntimeError for a chunk that leaves a gap."""
        have, length = self._filled[number], len(self.samples[number].input_ids_S)
        end = min(chunk.position + chunk.rows, length)  # beyond the prompt would be the model's own token
        if chunk.position > have:
            name = self.samples[number].sample_id
            raise RuntimeError(f"extract: sample {name}: token {chunk.position} came before token {have}. {FAULT}")
        if end <= have:
            return
        first = chunk.row + have - chunk.position
        rows = slice(first, first + end - have)
        into = slice(self._offsets[number] + have, self._offsets[number] + end)
        states_LNH = step.slot.states_LNH[:, rows]
        self.aux_TLH[into].copy_(states_LNH[:-1].transpose(0, 1))
        self.last_TH[into] = states_LNH[-1]
        self.ids_T[into] = step.ids_N[rows]
        self._filled[number] = end
        self._missing -= end - have


class Writers:
    """The threads. `put` is for the thread that runs the model, `report` and `close` for whoever answers the driver."""

    def __init__(self, work: Work, ring: Ring):
        self._work, self._ring = work, ring
        self._lock = threading.Lock()
        self._error: dict | None = None
        self._written: list[dict] = []
        self._on_their_way = 0
        """Steps and full shards that some thread has yet to deal with."""
        self._shards = enumerate(remaining(Path(work.prepared), work.planned, set(work.files)))
        self._next = 0
        self._open: dict[int, OpenShard] = {}
        self._memory: queue.SimpleQueue[Memory] = queue.SimpleQueue()
        self._allocated = 0
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()  # at most RING_STEPS: each holds a slot
        self._full: queue.SimpleQueue[OpenShard | None] = queue.SimpleQueue()  # at most shards_in_hand
        jobs: list[Callable[[], None]] = [self._empty_ring, *[self._write_shards] * work.writers]
        self._threads = [threading.Thread(target=job, daemon=True, name="aerie-states") for job in jobs]
        for thread in self._threads:
            thread.start()

    def put(self, step: Step) -> None:
        """A step ran. Never waits."""
        self._count(1)
        self._steps.put(step)

    def fail(self, error: BaseException) -> None:
        """Keep the first error for the driver; nothing is written any more."""
        with self._lock:
            self._error = self._error or tell(error)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def report(self) -> Report:
        """What was written since the last report, and the first error."""
        with self._lock:
            written, self._written = self._written, []
            waits_for = None if self._on_their_way else self._incomplete()
            return Report(written, self._error, waits_for)

    def _incomplete(self) -> str | None:
        """What an open shard lacks. Only for when no step is on its way: then nobody else looks at them."""
        return next((shard.lacks() for shard in self._open.values()), None)

    def _count(self, change: int) -> None:
        with self._lock:
            self._on_their_way += change

    def close(self) -> None:
        """Write what is being written, leave the rest, end the threads."""
        with self._lock:
            self._error = self._error or {"kind": "fault", "text": "closed"}
        self._steps.put(None)
        for _ in range(self._work.writers):
            self._full.put(None)
        for thread in self._threads:
            thread.join()

    # The thread that empties the ring. It outlives every error: a slot that is not given back would stop the model

    def _empty_ring(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step.slot.wait()
                if not self.failed:
                    self._take(step)
            except BaseException as error:  # noqa: BLE001 the driver raises it; a thread that died would tell nothing
                self.fail(error)
            finally:
                self._ring.release(step.slot)
                self._count(-1)

    def _take(self, step: Step) -> None:
        for chunk in step.chunks:
            shard, number, _ = request_place(chunk.request)
            open_shard = self._shard(shard)
            if open_shard is None:  # written already: the request was preempted after its last row
                continue
            open_shard.take(number, chunk, step)
            if open_shard.is_full:
                self._count(1)
                self._full.put(self._open.pop(shard))

    def _shard(self, wanted: int) -> OpenShard | None:
        """The shard, opened together with those before it if it is the first time that it is seen."""
        while self._next <= wanted:
            number, (planned, samples) = next(self._shards)
            self._open[number] = OpenShard(planned, samples, self._room())
            self._next = number + 1
        return self._open.get(wanted)

    def _room(self) -> Memory:
        """Memory for a shard: that of a written one, or new as long as there are fewer than may be in hand."""
        if not self._memory.empty():
            return self._memory.get()
        assert self._allocated < self._work.shards_in_hand, "the driver started more shards than may be in hand"
        self._allocated += 1
        work = self._work
        form, layers = work.expected, len(work.layer_ids) - 1
        aux_TLH = torch.empty(work.largest_tokens, layers, form.hidden_size, dtype=form.dtype)
        return aux_TLH, torch.empty(work.largest_tokens, form.hidden_size, dtype=form.dtype)

    # The writers

    def _write_shards(self) -> None:
        while (shard := self._full.get()) is not None:
            line = None
            try:
                if not self.failed:
                    line = self._write(shard)
            except BaseException as error:  # noqa: BLE001 the driver raises it; a thread that died would tell nothing
                self.fail(error)
            self._memory.put(shard.memory)
            with self._lock:
                self._on_their_way -= 1
                self._written += [line] if line else []

    def _write(self, shard: OpenShard) -> dict:
        work, folder = self._work, Path(self._work.folder)
        for sample, rows in shard.rows_of():
            states_LSH = [*shard.aux_TLH[rows].unbind(1), shard.last_TH[rows]]
            check_captured(sample, Captured(shard.ids_T[rows], states_LSH), work.expected)
        written = write_states(
            folder / shard.planned.file,
            shard.samples,
            shard.aux_TLH,
            shard.last_TH,
            aux_layers=work.layer_ids[:-1],
            last_layer=work.layer_ids[-1],
            run_key=work.run_key,
            store_dtype=work.store_dtype,
        )
        record(folder, shard.planned, written, work.run_key)
        return asdict(written)
