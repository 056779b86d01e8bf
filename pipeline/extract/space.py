"""Whether what is left to write fits the disk, to the byte, and what is on its way there fits memory: before the engine
is started."""

import os
import shutil
from pathlib import Path

from pipeline import memory
from pipeline.config import ExtractSection
from pipeline.errors import SpaceError
from pipeline.extract.plan import Planned
from pipeline.extract.stream import bounds
from pipeline.store.states import shard_bytes

RECORD_BYTES = 300
"""Of a record, or of a shard's line in the manifest: at most, with the longest numbers."""


def require_room(
    folder: Path, planned: list[Planned], present: set[str], *, aux_layers: list[int], last_layer: int,
    hidden_size: int, dtype: str, store_dtype: str | None
) -> None:  # fmt: skip
    """Raise SpaceError, with the numbers, unless the disk of `folder` has room for what of `planned` is not `present`.

    With the whole blocks that files take. What other parts are writing just now is not asked for twice.
    """
    free, block = shutil.disk_usage(folder).free, os.statvfs(folder).f_frsize

    def on_disk(shard: Planned) -> int:
        size = shard_bytes(
            shard.samples, shard.tokens, shard.names_bytes,
            aux_layers=aux_layers, last_layer=last_layer, hidden_size=hidden_size, dtype=dtype, store_dtype=store_dtype,
        )  # fmt: skip
        return -(-size // block) * block + -(-RECORD_BYTES // block) * block

    there = sum(on_disk(shard) for shard in planned if shard.file in present)
    left = sum(on_disk(shard) for shard in planned if shard.file not in present)
    if not left:
        return
    left += -(-RECORD_BYTES * len(planned) // block) * block  # the manifest
    unfinished = sum(_size(path) for path in folder.glob(".*tmp*"))
    if free < left - unfinished:
        raise SpaceError(
            f"extract: {folder} has {free / 1e9:,.2f} GB free and {left / 1e9:,.2f} GB are still to be written "
            f"({there / 1e9:,.2f} GB are there): {(left - unfinished - free) / 1e9:,.2f} GB are missing. "
            "Make room or set runs_dir to another disk; nothing was changed"
        )


def require_memory(section: ExtractSection, todo: list[Planned], token_bytes: int) -> None:
    """Raise SpaceError unless the machine and its container have memory for what engine `stream` holds while it makes
    `todo`: the kernel would end it later. `token_bytes` of states, as computed."""
    if section.engine != "stream":
        return
    shards = min(bounds.shards_in_hand(section), len(todo))
    largest = max(shard.tokens for shard in todo)
    wanted = bounds.ring_bytes(section, token_bytes) + shards * largest * token_bytes
    available = memory.room_bytes()
    if wanted > available:
        raise SpaceError(
            f"extract: {shards} shards in memory and the states on their way to them take {wanted / 1e9:.1f} GB, this "
            f"machine or container has {available / 1e9:.1f} GB free. Lower extract.shard_tokens or extract.writers, "
            "or set extract.engine to speculators; nothing was changed"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
