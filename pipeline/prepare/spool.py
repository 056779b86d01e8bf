"""Prompts on disk between the passes of a regenerating run: tokenised once, never all in memory.

A Parquet file of (sample_id, source, row, input_ids), whole or absent; it is removed when the folder is finished.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store import atomic_path

SCHEMA = pa.schema(
    [("sample_id", pa.string()), ("source", pa.string()), ("row", pa.int64()), ("input_ids", pa.list_(pa.int32()))]
)
GROUP_ROWS = 1024
"""Prompts in memory at a time."""


@dataclass(frozen=True)
class SpooledPrompt:
    """A prompt of S tokens, int32, and the row that it came from."""

    sample_id: str
    source: str
    row: int
    input_ids_S: np.ndarray


def write_prompts(path: Path, prompts: Iterable[SpooledPrompt]) -> int:
    """Write all prompts; returns how many."""
    count, iterator = 0, iter(prompts)
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        while group := list(islice(iterator, GROUP_ROWS)):
            columns = [
                [prompt.sample_id for prompt in group],
                [prompt.source for prompt in group],
                [prompt.row for prompt in group],
                [prompt.input_ids_S for prompt in group],
            ]
            writer.write_table(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA))
            count += len(group)
        writer.close()  # before the file is synced and renamed
    return count


def read_prompts(path: Path) -> Iterator[SpooledPrompt]:
    """All prompts, in order."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=GROUP_ROWS):
            ids = batch.column("input_ids")
            for row, (name, source, number) in enumerate(
                zip(*(batch.column(key).to_pylist() for key in ("sample_id", "source", "row")), strict=True)
            ):
                yield SpooledPrompt(name, source, number, ids[row].values.to_numpy())
