"""Where conversations come from: files, folders of them, Hugging Face data sets. Rows are streamed.

A row is (file, row number from 1, value): value is what the row holds, or a Rejected where it cannot be read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import InputError
from pipeline.prepare.rejects import Rejected
from pipeline.store import file_sha256

JSONL, PARQUET = (".jsonl", ".ndjson", ".json"), (".parquet",)
KEYS = ("id", "question_id", "conversations", "messages", "prompt", "turns", "tools")
"""Keys of a row that mean something here; no other column of a Parquet file is read."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

Row = tuple[str, int, Any]


class Source(Protocol):
    """One entry of prepare.sources."""

    name: str

    def identity(self) -> list[dict[str, str]]:
        """What the run key knows of the data: names with checksums or a commit."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows, in order."""
        ...


def open_sources(names: list[str]) -> list[Source]:
    """Find every source. Raises InputError for one that is not there, before anything is read or written."""
    return [_open(name) for name in names]


def _open(name: str) -> Source:
    try:
        return _find(name)
    except OSError as error:  # a folder on the way that may not be entered, a name that is too long
        raise InputError(f"prepare: source {name[:200]} cannot be read ({error.strerror})") from None


def _find(name: str) -> Source:
    path = Path(name)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in JSONL + PARQUET and not _hidden(f.relative_to(path)))
        if not files:
            raise InputError(f"prepare: source {name} is a folder without a .jsonl or .parquet file")
        return Files(name, files)
    if path.exists():
        if path.suffix not in JSONL + PARQUET:
            raise InputError(f"prepare: source {name} is neither a .jsonl nor a .parquet file. Convert or rename it")
        return Files(name, [path])
    base, _, split = name.partition(":")
    if (split and Path(base).is_dir()) or (HUB_NAME.fullmatch(base) and path.suffix not in JSONL + PARQUET):
        return HubDataset(name, base, split or "train")
    raise InputError(f"prepare: source {name} does not exist. Set prepare.sources to files, folders or data set names")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class Files:
    """JSONL and Parquet files, in the order given."""

    def __init__(self, name: str, files: list[Path]):
        self.name, self._files = name, files

    def identity(self) -> list[dict[str, str]]:
        try:
            return [{"file": file.name, "sha256": file_sha256(file)} for file in self._files]
        except OSError as error:
            raise InputError(
                f"prepare: source {error.filename or self.name} cannot be read ({error.strerror})"
            ) from None

    def rows(self) -> Iterator[Row]:
        for file in self._files:
            for number, value in enumerate_rows(file):
                yield str(file), number, value

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files)


def enumerate_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, value) of a file. Raises InputError where the file as a whole cannot be read."""
    try:
        yield from _parquet_rows(file) if file.suffix in PARQUET else _json_rows(file)
    except OSError as error:
        raise InputError(f"prepare: source {file} cannot be read ({error.strerror or error})") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
                if path.suffix == ".json" and line.lstrip()[:1] == b"[":
                    raise InputError(
                        f"prepare: source {path} is one JSON list. Convert it: jq -c '.[]' FILE > FILE.jsonl"
                    )
            if line.strip():
                yield number, _json(line)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejected("encoding", f"not UTF-8 at byte {error.start}")
    except ValueError as error:
        return Rejected("json", f"not JSON: {error}")
    except RecursionError:
        return Rejected("json", "not JSON: nested too deeply")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in KEYS]
            if not {*columns} - {"id", "question_id", "tools"}:
                raise InputError(f"prepare: source {path} has no column conversations, messages, prompt or turns "
                                 f"(it has {', '.join(names)})"[:300])  # fmt: skip
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    # a column that only other rows fill is not this row's
                    yield number, {key: value for key, value in row.items() if value is not None}
    except pa.ArrowException as error:
        raise InputError(f"prepare: source {path} is not a readable Parquet file ({str(error)[:200]})") from None


class HubDataset:
    """A Hugging Face data set, streamed. The commit is looked up once, so that one run sees one version."""

    def __init__(self, name: str, path: str, split: str):
        self.name, self._path, self._split = name, path, split
        self._revision: str | None = None

    def identity(self) -> list[dict[str, str]]:
        if (folder := Path(self._path)).is_dir():
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            return [{"file": file.name, "split": self._split, "sha256": file_sha256(file)} for file in files]
        from huggingface_hub import HfApi

        try:
            self._revision = HfApi().dataset_info(self._path).sha
        except Exception as error:  # network, login, unknown name: the hub's errors share no base class
            raise self._unusable(error) from error
        return [{"data_set": self._path, "split": self._split, "revision": str(self._revision)}]

    def rows(self) -> Iterator[Row]:
        import datasets

        try:
            data = datasets.load_dataset(self._path, split=self._split, revision=self._revision, streaming=True)
            for number, row in enumerate(data, 1):
                yield self.name, number, {key: value for key, value in row.items() if value is not None}
        except Exception as error:  # the same, and whatever a data set's own format raises
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> InputError:
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:  # the first one says what it is, the last ones wrap it
            cause = cause.__cause__ or cause.__context__ or cause
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]
        return InputError(
            f"prepare: source {self.name} is no file here and cannot be fetched as a data set: {reason}. "
            "Check name and network, or put files into data/ and name them in prepare.sources"
        )
