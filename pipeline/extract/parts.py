"""Several jobs, one folder: each takes a part of the planned shards (`extract.shard`), `merge` makes it a whole.

Job i of n takes every n-th shard, beginning with the i-th: samples that lie together are often alike in length, and so
the parts are alike in size. Which shards there are depends on the samples alone, so all jobs plan the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeline.extract.plan import Planned
from pipeline.store import exclusive, exclusive_part, remove_part_locks, waiting

CLAIM = "plan.json"


@dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `count`; 1 of 1 is the whole."""

    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, shard: str | None) -> "Part":
        """What `extract.shard` says: `2/4`, or nothing."""
        if shard is None:
            return cls()
        number, _, count = shard.partition("/")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def take(self, planned: list[Planned]) -> list[Planned]:
        """The shards of this part."""
        return planned[self.number - 1 :: self.count]


@contextmanager
def held(folder: Path, part: Part, step: str = "extract") -> Iterator[None]:
    """Hold the part, or the folder. Raises InUseError, naming the holder, when another process has it."""
    if not part.is_whole:
        with exclusive_part(folder, step, part.number, part.count):
            yield
        return
    with exclusive(folder, step):
        remove_locks(folder)
        yield


@contextmanager
def claiming(folder: Path, part: Part) -> Iterator[None]:
    """Parts begin, or reopen, a folder one after the other."""
    with nullcontext() if part.is_whole else waiting(folder / CLAIM, lambda: None):
        yield


def remove_locks(folder: Path) -> None:
    """Remove the lock files that parts have left. Only for the holder of the whole folder."""
    remove_part_locks(folder)
    (folder / f".{CLAIM}.lock").unlink(missing_ok=True)
