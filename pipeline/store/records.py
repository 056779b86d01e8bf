"""Which files of an unfinished folder are done, and what becomes of those that are not what was written.

Each finished shard has a record beside it, `shard-00000.json`, written after it: its line of the manifest to be, and
the run key. A file that does not have the checksum of its record (or of the manifest) is moved aside, never deleted:
`shard-00000.safetensors.damaged-1`.
"""

import errno
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path

from pipeline.errors import InputError
from pipeline.store.atomic import sync, write_json
from pipeline.store.checksums import checksums
from pipeline.store.manifest import Shard

DAMAGED = ".damaged-"
"""What comes after the name of a file that was moved aside, before a number."""


def record_file(folder: Path, file: str) -> Path:
    """Where a shard's record is."""
    return (folder / file).with_suffix(".json")


def write_record(folder: Path, shard: Shard, run_key: str) -> None:
    """Say that a shard is finished."""
    write_json(record_file(folder, shard.file), {"run_key": run_key, **asdict(shard)})


def read_record(folder: Path, file: str, run_key: str) -> Shard | None:
    """What was said of a finished shard; None where there is no record, or one that is torn or of another run."""
    try:
        value = json.loads(record_file(folder, file).read_bytes())
        own = value.pop("run_key") == run_key
        shard = Shard(**value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent or torn: then it says nothing
        return None
    return shard if own and shard.file == file else None


def remove_records(folder: Path, shards: list[Shard]) -> None:
    """Remove the shards' records, which the manifest has replaced."""
    for shard in shards:
        record_file(folder, shard.file).unlink(missing_ok=True)


def altered(
    folder: Path, shards: list[Shard], threads: int | None = None, on_bytes: Callable[[int], None] = lambda size: None
) -> dict[str, str]:
    """File name -> what is wrong, of those that are not what was written. Whole ones are read once, in several threads.

    A medium that cannot give its bytes back (EIO) has not kept them. Raises InputError, naming the file, for one that
    cannot be read for another reason: nothing is known of it. `on_bytes` is called with each piece's size, from any
    thread.
    """
    wrong: dict[str, str] = {}
    whole: list[Shard] = []
    for shard in shards:
        path = folder / shard.file
        if not path.is_file():
            wrong[shard.file] = "is missing"
        elif (size := path.stat().st_size) != shard.size_bytes:
            wrong[shard.file] = f"has {size:,} bytes, {shard.size_bytes:,} were written"
        else:
            whole.append(shard)
    sums = checksums((folder / shard.file for shard in whole), threads, on_bytes)
    for shard, checksum in zip(whole, sums, strict=True):
        if isinstance(checksum, OSError):
            if checksum.errno != errno.EIO:
                raise InputError(
                    f"{folder / shard.file} cannot be read ({checksum.strerror}). Nothing was changed; see to it, then "
                    "run this again"
                )
            wrong[shard.file] = f"cannot be read ({checksum.strerror})"
        elif checksum != shard.sha256:
            wrong[shard.file] = "is not what was written (checksum)"
    return wrong


def move_aside(folder: Path, files: Iterable[str]) -> list[str]:
    """Give each of `files` that is there a name that says that it is damaged; returns the new names."""
    moved: list[str] = []
    for file in files:
        if (path := folder / file).exists():
            names = (f"{file}{DAMAGED}{number}" for number in count(1))
            moved.append(next(name for name in names if not (folder / name).exists()))
            path.rename(folder / moved[-1])
    if moved:
        sync(folder)
    return moved
