"""Bytes that each step will write, and the room for them.

hidden/ is exact: the size of a shard is computed beside the function that writes it. Checkpoints are exact to some kB.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Run
from pipeline.extract.plan import split
from pipeline.forecast.data import Data
from pipeline.forecast.training import TrainingMemory
from pipeline.forecast.weights import TargetWeights
from pipeline.preflight.inputs import local_folder, weight_bytes
from pipeline.store.records import DAMAGED
from pipeline.store.states import shard_bytes
from pipeline.target import Target, is_hub_name
from pipeline.train.checkpoint import snapshot_bytes

PREPARED_BYTES_PER_TOKEN = 4.2
"""At most: an id of 4 bytes and a bit of the mask, before compression; some bits for what Parquet adds."""
CHECKPOINT_OVERHEAD_BYTES = 4096
"""config.json, progress.json and the headers of two safetensors files."""
ANSWER_BYTES = 4
"""Of an answer's token in the journal of prepare.regenerate, which is there until prepared/ is finished."""


@dataclass(frozen=True)
class Place:
    """A file system that will be written to: a folder on it, bytes still to be written there, bytes free."""

    folder: Path
    left: float
    free: int


def hidden_bytes(data: Data, target: Target, config: Run, dtype: str, store_dtype: str | None = None) -> int:
    """All shards of hidden/, of states computed in `dtype` and stored by `store_dtype`."""
    lengths, names = data.tokens_N.tolist(), data.names_bytes_N
    return sum(
        shard_bytes(
            len(lengths[part]),
            sum(lengths[part]),
            int(names[part].sum()),
            aux_layers=target.aux_layers(config.extract.aux_layers),
            last_layer=target.num_layers,
            hidden_size=target.hidden_size,
            dtype=dtype,
            store_dtype=store_dtype,
        )
        for part in split(lengths, config.extract.shard_tokens)
    )


def checkpoint_bytes(config: Run, target: Target, memory: TrainingMemory) -> int:
    """One folder step-N: the draft in the target's dtype with its word map, weights and moments in float32."""
    words = config.vocab.draft_vocab_size
    word_map = 0 if words >= target.vocab_size else 8 * words + target.vocab_size
    tensors = snapshot_bytes(memory.parameters, memory.moments, target.dtype)
    return tensors + word_map + CHECKPOINT_OVERHEAD_BYTES


def checkpoints_held(config: Run, steps: int) -> int:
    """Most checkpoints that are there at once: those kept, the best, and the one that is being written."""
    every = config.train.checkpoint_steps
    saved = config.train.epochs if every is None else -(-steps // every)
    return min(config.train.keep_checkpoints + 2, saved)


def prepared_bytes(data: Data, config: Run) -> float:
    """At most: prepared/ while it is being made."""
    journal = ANSWER_BYTES * data.answer_tokens if config.prepare.regenerate else 0
    return PREPARED_BYTES_PER_TOKEN * data.tokens + int(data.names_bytes_N.sum()) + journal


def vocab_bytes(config: Run, target: Target) -> int:
    """vocab/: d2t and t2d."""
    return 8 * min(config.vocab.draft_vocab_size, target.vocab_size) + target.vocab_size


def target_place(config: Run, weights: TargetWeights) -> tuple[Path, float]:
    """Where the target's weights will lie, and how much of them is still to be fetched."""
    section, folder = config.target, local_folder(config.target)
    there = weight_bytes(folder) if folder else 0
    if not is_hub_name(section.path):
        return Path(section.path), 0 if folder else weights.total
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE), max(0, weights.total - there)


def places(wanted: list[tuple[Path, float]]) -> list[Place]:
    """What is to be written where, the folders of one file system together."""
    found: dict[int, Place] = {}
    for folder, size in wanted:
        here = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
        device = os.stat(here).st_dev  # noqa: PTH116
        if device in found:
            found[device] = Place(found[device].folder, found[device].left + size, found[device].free)
        else:
            found[device] = Place(here, size, shutil.disk_usage(here).free)
    return list(found.values())


def written_bytes(folder: Path) -> int:
    """Size of the files that a step has in its folder already; those that it will make again are not counted."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if DAMAGED not in path.name)
