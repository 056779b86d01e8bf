"""Checksums of many files, as fast as the disk reads: several files at once, each by a thread of its own."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 1 << 20
"""Read at once. hashlib lets other threads run while it works on so much."""
MAX_THREADS = 16
"""By default at most: a core hashes 1 to 2 GB/s, which is more than the disks behind one folder give to 16."""


def default_threads() -> int:
    """One for each core that this process may use, up to MAX_THREADS."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def checksums(
    paths: Iterable[Path], threads: int | None = None, on_bytes: Callable[[int], None] = lambda size: None
) -> Iterator[str | OSError]:
    """SHA-256 of each file in hex, in order, or the error that kept it from being read.

    `on_bytes` is called with each piece's size, from any thread. When the caller stops, so do the threads.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="checksum")
    try:
        yield from pool.map(lambda path: _checksum(path, stop, on_bytes), paths)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _checksum(path: Path, stop: threading.Event, on_bytes: Callable[[int], None]) -> str | OSError:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while (size := file.readinto(buffer)) and not stop.is_set():
                digest.update(buffer[:size])
                on_bytes(size)
    except OSError as error:
        return error
    return digest.hexdigest()
