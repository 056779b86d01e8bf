"""Rows read ahead of the trainer, by threads, in exactly the order in which it takes them.

Threads and not processes: reading (preadv) and decoding (torch) leave Python's lock to others, and rows need not be
sent anywhere. A row of 8,192 tokens of Kimi-K2.5 has 470 MB; docs/performance.md has what threads read.

On a GPU a row is read into pinned memory as it is stored, which is used again and again, and copied and decoded by a
stream of its own: the next row's copy runs while the one before it is computed on.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pipeline.train.data import Row, Rows

READERS = 4
"""Threads at most. A GPU that trains 30,000 tokens/s of Kimi-K2.5 takes 1.7 GB/s of states."""


class RowsAhead:
    """Iterates over the rows of `order` (each a list of sample indices), on `device`.

    Of those that were not taken yet, at most `ahead` are read or being read; their memory is `ahead` times
    `row_bytes`, whatever the disk does. With 0 each is read when it is asked for. An error in a thread is raised
    where its row is taken, not before, so that it comes at the same step in every run. Within a `with` block; leaving
    it waits for reads that are under way (of one row each), and for no others. `stream` is the one that copies to a
    GPU: who makes several of these one after the other gives all the same, as memory is kept for each.
    """

    def __init__(self, rows: Rows, order: Iterable[list[int]], ahead: int, device: torch.device, stream: Any = None):
        self.rows, self.order, self.ahead, self.device = rows, iter(order), ahead, device
        self.waited_s = 0.0
        """How long the taker has waited for rows: nothing to speak of where reading keeps up."""
        self._reading: deque[Future[Row]] = deque()
        self._moved: deque[tuple[Row, Any]] = deque()
        cuda = device.type == "cuda"
        self._stream = stream or (torch.cuda.Stream(device) if cuda else None)
        self._rooms: SimpleQueue[tuple[Row, Any]] = SimpleQueue()
        if ahead and cuda:
            for _ in range(ahead):
                self._rooms.put((rows.room(stored=True, pinned=True), None))
        count = min(ahead, READERS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(count, "reader") if ahead else None

    def __enter__(self) -> "RowsAhead":
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        begun = time.monotonic()
        if self._threads is None:
            row = self.rows.load(next(self.order)).to(self.device)
            self.waited_s += time.monotonic() - begun
            return row
        if self._moved:
            row, ready = self._moved.popleft()
        elif self._reading:
            row, ready = self._move(self._reading.popleft().result())
        else:
            raise StopIteration
        self.waited_s += time.monotonic() - begun
        self._fill()
        if self._stream is not None:
            self._take(row, ready)
            if not self._moved and self._reading and _is_ready(self._reading[0]):
                self._moved.append(self._move(self._reading.popleft().result()))
                self._fill()
        return row

    def give_back(self, *rows: Row) -> None:
        """The taker is done with these rows: without a GPU their memory is used again, which is faster than new."""
        if self._threads and self._stream is None:
            for row in rows:
                self._rooms.put((row, None))

    def _fill(self) -> None:
        """Have threads read as many rows as may be ahead."""
        while self._threads and len(self._reading) < self.ahead:
            if (samples := next(self.order, None)) is None:
                return
            self._reading.append(self._threads.submit(self._read, samples))

    def _read(self, samples: list[int]) -> Row:
        if self._stream is None:
            try:
                return self.rows.load(samples, self._rooms.get_nowait()[0])
            except Empty:
                return self.rows.load(samples)
        room, copied = self._rooms.get()
        if copied is not None:
            copied.synchronize()  # the copy from it may still be under way
        try:
            return self.rows.load(samples, room)
        except BaseException:
            self._rooms.put((room, None))
            raise

    def _move(self, row: Row) -> tuple[Row, Any]:
        """Begin to copy a row to the GPU; its memory is given back for when that is done."""
        if self._stream is None:
            return row, None
        with torch.cuda.stream(self._stream):
            copy, copied, decoded = row.to(self.device), torch.cuda.Event(), torch.cuda.Event()
            copied.record(self._stream)
            there = copy.decoded(self.rows.dtype)
            decoded.record(self._stream)
        self._rooms.put((row, copied))
        return there, decoded

    def _take(self, row: Row, ready: Any) -> None:
        """From here on the row is the computing stream's."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        for tensor in vars(row).values():
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)


def _is_ready(read: "Future[Row]") -> bool:
    return read.done() and read.exception() is None
