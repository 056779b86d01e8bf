"""What the driver and the worker say to each other: plain text, which every transport of vLLM's carries as it is.

S tokens of a sample, T of a shard, L captured layers, H hidden size
"""

import errno
import json
import signal
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.errors import ConfigError, InputError, MismatchError, SpaceError, UserError
from pipeline.extract.check import Expected
from pipeline.extract.plan import Planned

END = signal.SIGUSR1
"""What the driver sends to vLLM's engine process to end it."""


@dataclass(frozen=True)
class Work:
    """One stream: the shards of `planned` whose file is in `files`, from `prepared` to `folder`."""

    prepared: str
    folder: str
    planned: list[Planned]
    files: list[str]
    run_key: str
    layer_ids: list[int]
    """In vLLM's serving convention, the number of layers last."""
    hidden_size: int
    dtype: str
    max_batched_tokens: int
    writers: int
    shards_in_hand: int
    store_dtype: str | None = None
    """As what the files hold the states: `extract.store_dtype`."""

    @property
    def expected(self) -> Expected:
        """The form of a sample's states."""
        return Expected(self.layer_ids, self.hidden_size, getattr(torch, self.dtype))

    @property
    def todo(self) -> list[Planned]:
        """The shards to be made."""
        files = set(self.files)
        return [shard for shard in self.planned if shard.file in files]

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest shard."""
        return max((shard.tokens for shard in self.todo), default=0)

    def to_text(self) -> str:
        """JSON, for a worker that may be in another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Work":
        value = json.loads(text)
        return cls(**{**value, "planned": [Planned(**shard) for shard in value["planned"]]})


@dataclass(frozen=True)
class Report:
    """What became of the work since the last report: lines of the shards that are written, and the first error.

    `waits_for`: nothing is on its way to the disk, and this is the first thing that rows are missing of.
    """

    written: list[dict[str, Any]]
    error: dict[str, Any] | None
    waits_for: str | None = None

    def to_text(self) -> str:
        """JSON, for the driver."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_text(cls, text: str) -> "Report":
        return cls(**json.loads(text))


class Place(NamedTuple):
    """Whose request it is: `sample` of `shard`, which has so many `samples`. Counted from 0, the shard among those that
    are to be made."""

    shard: int
    sample: int
    samples: int

    @property
    def is_last(self) -> bool:
        """Of its shard."""
        return self.sample == self.samples - 1

    def name(self) -> str:
        """For vLLM."""
        return f"{self.shard}/{self.sample}/{self.samples}"


def request_place(name: str) -> Place:
    """By the name that worker and scheduler see: vLLM adds a dash and eight random digits."""
    return Place(*map(int, name.partition("-")[0].split("/")))


_KINDS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (ConfigError, InputError, MismatchError, SpaceError)
}


def tell(error: BaseException) -> dict[str, Any]:
    """An error as plain values."""
    if type(error).__name__ in _KINDS:
        return {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, OSError):
        text = error.strerror or str(error) or type(error).__name__
        file = error.filename if isinstance(error.filename, str | Path) else None
        return {"kind": "OSError", "errno": error.errno or errno.EIO, "text": text, "file": file and str(file)}
    return {"kind": "fault", "text": "".join(traceback.format_exception(error))}


def told(error: dict[str, Any]) -> Exception:
    """The error that `tell` described, to be raised here. A fault of ours keeps the worker's traceback as its text."""
    if error["kind"] in _KINDS:
        return _KINDS[error["kind"]](error["text"])
    if error["kind"] == "OSError":
        return OSError(error["errno"], error["text"], *([error["file"]] if error["file"] else []))
    return RuntimeError(f"extract: the worker failed:\n{error['text']}")
