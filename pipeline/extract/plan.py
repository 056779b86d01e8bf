"""Which samples go into which shard, and which shards are done.

The split depends on the samples and on `shard_tokens` alone, so a resumed run makes the same files, and so do several
jobs that take a part of the shards each. A shard counts as done when its record (pipeline.store.records) belongs to
this run and its bytes have the recorded checksum. Everything else is made again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pipeline.errors import InputError
from pipeline.progress import Meter
from pipeline.store import Manifest, Shard
from pipeline.store.records import altered, move_aside, read_record, write_record
from pipeline.store.samples import Sample, read_samples
from pipeline.store.states import check_shard


@dataclass(frozen=True)
class Planned:
    """A shard to be: its file, how many of the next samples it takes, and their tokens."""

    file: str
    samples: int
    tokens: int
    supervised: int
    names_bytes: int
    """Of all sample and conversation ids, in UTF-8."""


@dataclass(frozen=True)
class Limits:
    """What a sample must keep to: ids from 0 to `vocab_size` - 1, 1 to `max_length` tokens."""

    vocab_size: int
    max_length: int

    def check(self, sample: Sample) -> None:
        """Raise InputError, naming the sample, when the target cannot take it."""
        ids, mask = sample.input_ids_S, sample.loss_mask_S
        if not 0 < len(ids) <= self.max_length:
            raise InputError(
                f"extract: sample {sample.sample_id} has {len(ids)} tokens, 1 to {self.max_length} (target.max_length) "
                "are allowed. Run prepare again with this configuration"
            )
        if len(mask) != len(ids):
            raise InputError(
                f"extract: sample {sample.sample_id} has {len(ids)} tokens and {len(mask)} mask values. "
                "Remove the prepared folder, run prepare again"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids.max() if ids.max() >= self.vocab_size else ids.min()
            raise InputError(
                f"extract: sample {sample.sample_id} has token id {wrong}, the target knows 0 to "
                f"{self.vocab_size - 1}. It was prepared with another tokenizer: check target.path, prepare again"
            )


def plan(prepared: Path, shard_tokens: int, limits: Limits) -> list[Planned]:
    """Split the prepared samples, in their order, into shards of at most `shard_tokens` tokens (or one sample).

    Reads all samples once, holds one of them and three numbers of each. Raises InputError for a sample that the
    target cannot take, or for none at all.
    """
    lengths: list[int] = []
    supervised: list[int] = []
    names_bytes: list[int] = []
    for sample in read_samples(prepared):
        limits.check(sample)
        lengths.append(len(sample.input_ids_S))
        supervised.append(int(sample.loss_mask_S.sum()))
        names_bytes.append(len(sample.sample_id.encode()) + len(sample.conversation_id.encode()))
    shards = [
        Planned(
            file=f"shard-{number:05d}.safetensors",
            samples=len(lengths[part]),
            tokens=sum(lengths[part]),
            supervised=sum(supervised[part]),
            names_bytes=sum(names_bytes[part]),
        )
        for number, part in enumerate(split(lengths, shard_tokens))
    ]
    if not shards:
        raise InputError(f"extract: {prepared} holds no samples. See rejected.jsonl there, run prepare again")
    return shards


def split(lengths: list[int], shard_tokens: int) -> Iterator[slice]:
    """Which samples, by their lengths in tokens, share a shard: as many as fit, or one that does not."""
    first = tokens = 0
    for number, length in enumerate(lengths):
        if number > first and tokens + length > shard_tokens:
            yield slice(first, number)
            first, tokens = number, 0
        tokens += length
    if lengths:
        yield slice(first, len(lengths))


def remaining(prepared: Path, planned: list[Planned], todo: set[str]) -> Iterator[tuple[Planned, list[Sample]]]:
    """Each shard whose file is in `todo`, with its samples; the memory of one shard's ids."""
    samples = read_samples(prepared)
    for shard in planned:
        its_samples = list(islice(samples, shard.samples))
        if shard.file in todo:
            yield shard, its_samples


def record(folder: Path, planned: Planned, shard: Shard, run_key: str) -> None:
    """Say that a shard is finished."""
    assert (shard.file, shard.samples, shard.tokens) == (planned.file, planned.samples, planned.tokens)
    write_record(folder, shard, run_key)


@dataclass(frozen=True)
class Found:
    """What an earlier run left: the finished shards by file name, files that must be made again, and the names under
    which those of them are kept that are not what was written."""

    done: dict[str, Shard]
    again: list[str]
    aside: list[str]


def verified(folder: Path, planned: list[Planned], run_key: str) -> Found:
    """Look at the files of `planned`. Reads every finished shard once, for its checksum; moves damaged ones aside."""
    there = {item.file for item in planned if (folder / item.file).is_file()}
    done: dict[str, Shard] = {}
    for item in planned:
        shard = read_record(folder, item.file, run_key)
        if shard and (shard.samples, shard.tokens) == (item.samples, item.tokens):
            done[item.file] = shard
    with Meter(f"verifies {folder}", sum(shard.size_bytes for shard in done.values())) as meter:
        wrong = altered(folder, list(done.values()), on_bytes=meter.add)
    again = [item.file for item in planned if item.file in wrong or (item.file in there and item.file not in done)]
    done = {file: shard for file, shard in done.items() if file not in wrong}
    return Found(done, again, move_aside(folder, wrong))


def remove_leftovers(folder: Path, planned: list[Planned], *, alone: bool) -> None:
    """Remove what a killed process left half-written: beside other parts (not `alone`) that of our own shards."""
    own = {f".{name}.tmp" for shard in planned for name in (shard.file, Path(shard.file).stem + ".json")}
    for path in folder.glob(".*tmp*"):
        if alone or path.name in own:
            path.unlink()


def reopen(folder: Path, manifest: Manifest) -> list[str]:
    """Undo `finish` when files of a finished folder are missing, torn or foreign; returns the errors, one a file.

    Whole files keep their records. Their checksums are verified afterwards, like those of any interrupted run.
    """
    errors: list[str] = []
    for shard in manifest.shards:
        try:
            check_shard(folder, shard, manifest)
        except InputError as error:
            errors.append(str(error))
    if errors:
        for shard in manifest.shards:
            write_record(folder, shard, manifest.run_key)
        (folder / "manifest.json").unlink()
    return errors
