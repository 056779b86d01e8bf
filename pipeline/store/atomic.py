"""Files that are whole or absent, whatever happens while they are written."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, SpaceError

CANNOT_WRITE = {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE}
"""What a disk answers that is broken, read-only, or another user's."""


@contextmanager
def writing(folder: Path, step: str) -> Iterator[None]:
    """Raise InputError for a disk that does not take what is written. (A full one is told by the command line.)"""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        where = Path(os.fsdecode(error.filename or folder))
        what = "written" if where.is_relative_to(folder) else "read or written"
        raise InputError(
            f"{step}: {where} cannot be {what} ({error.strerror or error}). What is finished is kept; "
            "see to the disk or its permissions, then run it again: it goes on"
        ) from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; on leaving it is synced and renamed to `path`, on an error removed.

    The name is fixed, so that what a killed process left is overwritten by the next run, not collected.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
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
            sync(inner)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        sync(path.parent)
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


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
