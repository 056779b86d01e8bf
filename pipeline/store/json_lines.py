"""JSON objects, one a line, appended to a file or sent to stderr: what other programs follow while a step works."""

import json
import sys
from pathlib import Path
from typing import IO, Any


class JsonLines:
    """`target` is a file's path, or `-` for stderr. Each line is whole: it is handed to the kernel in one piece.

    Raises OSError when the file cannot be opened. A line that cannot be written later does not stop the work it tells
    of: that is said once, and no more lines follow.
    """

    def __init__(self, target: str):
        self._target = target
        self._file: IO[bytes] | None = None
        if target != "-":
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(target).open("ab", buffering=0)  # noqa: SIM115
        self._broken = False

    def write(self, value: dict[str, Any]) -> None:
        """Append one object."""
        line = json.dumps(value, ensure_ascii=False) + "\n"
        if self._broken:
            return
        try:
            if self._file is None:
                print(line, end="", file=sys.stderr, flush=True)
            else:
                self._file.write(line.encode())
        except OSError as error:
            self._broken = True
            if self._file is not None:
                print(f"{self._target} cannot be written ({error.strerror}): no more lines", file=sys.stderr)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
