"""An append-only file of finished pieces of work, so that a killed run goes on with what is missing.

One line a piece: the CRC-32 of the rest in eight hex digits, a space, JSON, a newline. A line that is torn (the
process died in it) or changed (a flipped bit) does not match its checksum and counts as not done.
"""

import json
import os
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

SYNC_INTERVAL_S = 5.0
"""A killed process loses nothing that was appended; a machine without power loses at most so many seconds."""


class Journal:
    """Pieces of work by key. Values stay on disk: in memory are the keys and where their lines begin.

    `damaged` counts the lines that could not be used.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._offsets: dict[str, int] = {}
        self._synced = time.monotonic()
        self.damaged = 0
        self._scan()

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, key: str) -> Any:
        """The value that was appended last for `key`. Raises KeyError when there is none."""
        self._file.seek(self._offsets[key])
        record = _parse(self._file.readline())
        assert record is not None, "the journal changed while it was open"
        return record[1]

    def append(self, key: str, value: Any) -> None:
        """Add a finished piece. It is the kernel's when this returns."""
        body = json.dumps([key, value], ensure_ascii=False, separators=(",", ":")).encode()
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(b"%08x %s\n" % (zlib.crc32(body), body))
        self._file.flush()
        self._offsets[key] = offset
        if time.monotonic() - self._synced > SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()

    def _scan(self) -> None:
        self._file.seek(0)
        offset, line = 0, b""
        for line in self._file:
            record = _parse(line)
            if record is None:
                self.damaged += 1
            else:
                self._offsets[record[0]] = offset
            offset += len(line)
        if line and not line.endswith(b"\n"):  # what is appended next must not stick to a torn line
            self._file.write(b"\n")
            self._file.flush()


def _parse(line: bytes) -> tuple[str, Any] | None:
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    key, value = json.loads(body)
    return key, value
