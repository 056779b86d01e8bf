"""Who may write where. The kernel drops a lock with its process, so a killed run leaves nothing to clean up.

    .lock              held by the one writer of a folder, or shared by the writers of its parts
    .lock.part-2-of-4  held by the writer of that part

On a network file system the locks hold between machines where it passes them on: NFS and CephFS do, Lustre with
`-o flock`.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pipeline.errors import InUseError

PARTS = ".lock.part-*"
PROBE_S = 0.2
"""Another process that only asks whether a lock is held holds it for a moment: no reason to refuse."""


@contextmanager
def exclusive(folder: Path, step: str) -> Iterator[None]:
    """Hold `folder` for one process. Raises InUseError, naming the holder, when another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        if not _taken(lock, fcntl.LOCK_EX):
            part = next((path for path in sorted(folder.glob(PARTS)) if _is_held(path)), None)
            raise _in_use(f"{step}: {folder}", part.read_text() if part else _text(lock))
        _sign(lock)
        yield


@contextmanager
def exclusive_part(folder: Path, step: str, number: int, count: int) -> Iterator[None]:
    """Hold part `number` of `count` of `folder`, beside the other parts.

    Raises InUseError, naming the holder, when another process has the part or the whole folder, or a part of
    another `count`, which would write some of the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as whole:
        if not _taken(whole, fcntl.LOCK_SH):
            raise _in_use(f"{step}: {folder}", _text(whole))
        with (folder / f".lock.part-{number}-of-{count}").open("a+") as part:
            if not _taken(part, fcntl.LOCK_EX) and (time.sleep(PROBE_S) or not _taken(part, fcntl.LOCK_EX)):
                raise _in_use(f"{step}: part {number}/{count} of {folder}", _text(part))
            _sign(part)
            # After our own lock: of two that begin at once, one sees the other
            _refuse_other_split(folder, step, count)
            yield


def _refuse_other_split(folder: Path, step: str, count: int) -> None:
    for other in sorted(folder.glob(PARTS)):
        if not other.name.endswith(f"-of-{count}") and _is_held(other):
            what = f"{step}: {folder}, split into {other.name.rpartition('-')[2]} parts,"
            raise _in_use(what, other.read_text())


def remove_part_locks(folder: Path) -> None:
    """Remove the files of all parts' locks. Only for the holder of the whole folder: no part can be at work then."""
    for path in folder.glob(PARTS):
        path.unlink()


@contextmanager
def waiting(path: Path, say: Callable[[], None]) -> Iterator[None]:
    """Hold `path`, which need not exist, for one process; where another one has it, call `say` and wait for it.

    The lock is a file beside `path`, which stays: removing it would let a third process in beside a second one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        if not _taken(lock, fcntl.LOCK_EX):
            say()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _taken(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held(path: Path) -> bool:
    with path.open("a+") as lock:
        return not _taken(lock, fcntl.LOCK_SH)


def _sign(lock: IO[str]) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()} on {socket.gethostname()}")
    lock.flush()


def _text(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read()


def _in_use(what: str, holder: str) -> InUseError:
    return InUseError(
        f"{what} is being written by process {holder.strip() or 'unknown'}. Wait for it, or give this run another name"
    )
