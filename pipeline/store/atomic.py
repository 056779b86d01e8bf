"""Files that are whole or absent, whatever happens while they are written."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import MismatchError, SpaceError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; on leaving it is synced and renamed to `path`, on an error removed.

    The name is fixed, so that what a killed process left is overwritten by the next run, not collected.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; on leaving it is synced and takes `path`'s place, on an error removed."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for inner in [*temporary.rglob("*"), temporary]:
            _sync(inner)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically. NaN and infinity, which are not JSON, raise ValueError."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, size_bytes: int, step: str, key: str = "runs_dir") -> None:
    """Raise SpaceError, with both numbers and the key that says where, unless `folder`'s disk has `size_bytes` free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise SpaceError(
            f"{step}: {folder} has {free / 1e9:.2f} GB free and about {size_bytes / 1e9:.2f} GB will be written. "
            f"Make room or set {key} to another disk; nothing was changed"
        )


@contextmanager
def exclusive(folder: Path, step: str) -> Iterator[None]:
    """Hold `folder` for one process. Raises MismatchError, naming the holder, when another one has it.

    The kernel drops the lock with the process, so a killed run leaves nothing to clean up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise MismatchError(
                f"{step}: {folder} is being written by process {lock.read().strip() or 'unknown'}. "
                "Wait for it, or give this run another name"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextmanager
def waiting(path: Path, say: Callable[[], None]) -> Iterator[None]:
    """Hold `path`, which need not exist, for one process; where another one has it, call `say` and wait for it.

    The lock is a file beside `path`, which stays: removing it would let a third process in beside a second one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
