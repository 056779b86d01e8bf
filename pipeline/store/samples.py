"""Prepared samples as Parquet: one row a sample.

sample_id        string
conversation_id  string, shared by the samples of one conversation (validation splits by it)
input_ids        list<int32>
loss_mask        list<bool>, as long as input_ids: true where the target's own words are to be predicted
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InputError
from pipeline.store.atomic import atomic_path
from pipeline.store.manifest import Shard, read_manifest

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One sequence of S tokens: `input_ids_S` int32, `loss_mask_S` bool."""

    sample_id: str
    conversation_id: str
    input_ids_S: np.ndarray
    loss_mask_S: np.ndarray


def write_samples(path: Path, samples: list[Sample]) -> Shard:
    """Write one Parquet file atomically and describe it."""
    columns = [
        [sample.sample_id for sample in samples],
        [sample.conversation_id for sample in samples],
        [sample.input_ids_S for sample in samples],
        [sample.loss_mask_S for sample in samples],
    ]
    table = pa.table([pa.array(c, t.type) for c, t in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return Shard.describe(path, len(samples), sum(len(sample.input_ids_S) for sample in samples))


def read_samples(folder: Path) -> Iterator[Sample]:
    """All samples of a finished `prepared/` folder, in order, with the memory of one row group.

    Raises InputError for an unfinished folder or a file that is not as its manifest says.
    """
    for shard in read_manifest(folder, "prepare").shards:
        path = folder / shard.file
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=1024):
                    yield from _samples_of(batch)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"prepare: {path} cannot be read ({error}). Run prepare again") from None


def sample_sizes(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of every sample of a finished `prepared/` folder, in order: its tokens, and the bytes of its two ids. int64.

    Reads the masks for it, which are an eighth of a byte a token. Raises InputError as `read_samples` does.
    """
    from pyarrow import compute

    count: Any = compute  # its functions are made at run time
    tokens, names = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for shard in read_manifest(folder, "prepare").shards:
        path = folder / shard.file
        try:
            table = pq.read_table(path, columns=["sample_id", "conversation_id", "loss_mask"])
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"prepare: {path} cannot be read ({error}). Run prepare again") from None
        tokens.append(count.list_value_length(table["loss_mask"]).to_numpy().astype(np.int64))
        sample, conversation = (count.binary_length(table[key]) for key in ("sample_id", "conversation_id"))
        names.append(sample.to_numpy().astype(np.int64) + conversation.to_numpy())
    return np.concatenate(tokens), np.concatenate(names)


def _samples_of(batch: pa.RecordBatch) -> Iterator[Sample]:
    ids, masks = batch.column("input_ids"), batch.column("loss_mask")
    for row in range(batch.num_rows):
        yield Sample(
            batch.column("sample_id")[row].as_py(),
            batch.column("conversation_id")[row].as_py(),
            ids[row].values.to_numpy(),
            masks[row].values.to_numpy(zero_copy_only=False),  # bits, so a copy
        )
