"""Which samples go into which shard, and which shards are done.

The split depends on the samples and on `shard_tokens` alone, so a resumed run makes the same files. Each finished
shard has a record beside it, `shard-00000.json`, written after it; a shard counts as done when its record belongs
to this run and its bytes have the recorded checksum. Everything else is made again.
"""

import json
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from pipeline.errors import InputError
from pipeline.store import Manifest, Shard, file_sha256, write_json
from pipeline.store.samples import Sample, read_samples
from pipeline.store.states import check_shard


@dataclass(frozen=True)
class Planned:
    """A shard to be: its file, how many of the next samples it takes, and their tokens."""

    file: str
    samples: int
    tokens: int
    supervised: int

    @property
    def record(self) -> str:
        """Name of the file that says that the shard is finished."""
        return self.file.removesuffix(".safetensors") + ".json"


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

    Reads all samples once, holds one. Raises InputError for a sample that the target cannot take, or for none at all.
    """
    shards: list[Planned] = []
    samples = tokens = supervised = 0

    def close() -> None:
        if samples:
            shards.append(Planned(f"shard-{len(shards):05d}.safetensors", samples, tokens, supervised))

    for sample in read_samples(prepared):
        limits.check(sample)
        if tokens + len(sample.input_ids_S) > shard_tokens:
            close()
            samples = tokens = supervised = 0
        samples += 1
        tokens += len(sample.input_ids_S)
        supervised += int(sample.loss_mask_S.sum())
    close()
    if not shards:
        raise InputError(f"extract: {prepared} holds no samples. See rejected.jsonl there, run prepare again")
    return shards


def remaining(prepared: Path, planned: list[Planned], done: Container[str]) -> Iterator[tuple[Planned, list[Sample]]]:
    """Each shard that is not done, with its samples; the memory of one shard's ids."""
    samples = read_samples(prepared)
    for shard in planned:
        its_samples = list(islice(samples, shard.samples))
        if shard.file not in done:
            yield shard, its_samples


def record(folder: Path, planned: Planned, shard: Shard, run_key: str) -> None:
    """Say that a shard is finished."""
    write_json(folder / planned.record, {"run_key": run_key, **asdict(shard)})


def verified(folder: Path, planned: list[Planned], run_key: str) -> tuple[dict[str, Shard], list[str]]:
    """The finished shards by file name, and the files that are there but must be made again.

    Reads every finished shard once, for its checksum.
    """
    done: dict[str, Shard] = {}
    again: list[str] = []
    for item in planned:
        path = folder / item.file
        shard = _recorded(folder / item.record, item, run_key)
        if not path.is_file():
            again += [item.file] if shard else []
        elif shard and path.stat().st_size == shard.size_bytes and file_sha256(path) == shard.sha256:
            done[item.file] = shard
        else:
            again.append(item.file)
    return done, again


def _recorded(path: Path, planned: Planned, run_key: str) -> Shard | None:
    try:
        value = json.loads(path.read_bytes())
        own = value.pop("run_key") == run_key
        shard = Shard(**value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent or torn: then it says nothing
        return None
    fits = (shard.file, shard.samples, shard.tokens) == (planned.file, planned.samples, planned.tokens)
    return shard if own and fits else None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written. Every temporary file's name begins with a dot."""
    for path in folder.glob(".*tmp*"):
        path.unlink()


def remove_records(folder: Path, shards: list[Shard]) -> None:
    """Remove the shards' records, which the manifest has replaced."""
    for shard in shards:
        (folder / shard.file).with_suffix(".json").unlink(missing_ok=True)


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
            write_json((folder / shard.file).with_suffix(".json"), {"run_key": manifest.run_key, **asdict(shard)})
        (folder / "manifest.json").unlink()
    return errors
