"""Samples to Parquet shards, cut to length, with everything counted that a user should know."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.prepare.rejects import Rejected
from pipeline.store import Shard
from pipeline.store.samples import Sample, write_samples

SHARD_SAMPLES = 4096
"""Samples in one file: small enough for memory (4096 x 2048 tokens x 5 B = 42 MB), large enough to read fast."""


@dataclass
class Totals:
    """What the manifest says of the folder. Tokens are those of the samples as written."""

    rows: int = 0
    """Rows read from the sources."""
    conversations: int = 0
    """Conversations that gave at least one sample."""
    samples: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Rejected rows and turns, by code."""
    tokens: int = 0
    supervised_tokens: int = 0
    truncated_samples: int = 0
    """Samples cut at target.max_length."""
    truncated_tokens: int = 0
    """Tokens cut off them."""
    truncated_answers: int = 0
    """Regenerated answers that reached their token limit before the target ended its turn."""
    unused_turns: int = 0
    """Turns that nothing is made of: after the last answer, or after the first of `turns`."""
    lost_reasoning: int = 0
    """Turns whose reasoning the chat template leaves out."""
    turns_without_end: int = 0
    """Turns after which the chat template writes no end-of-turn token."""

    def as_json(self) -> dict[str, Any]:
        """For the manifest; codes in order."""
        return dataclasses.asdict(self) | {"rejected": dict(sorted(self.rejected.items()))}


class SampleWriter:
    """Cuts samples to `max_length`, writes them in shards of SHARD_SAMPLES, counts into `totals`."""

    def __init__(self, folder: Path, max_length: int, totals: Totals, prefix: str = "samples"):
        self._folder, self._max_length, self._totals, self._prefix = folder, max_length, totals, prefix
        self._pending: list[Sample] = []
        self._conversation = ""
        self.shards: list[Shard] = []

    def add(self, sample: Sample) -> None:
        """Take one sample. Raises Rejected where nothing supervised is left within the length."""
        supervised = sample.loss_mask_S.nonzero()[0]
        if not len(supervised):
            raise Rejected("no_supervised_token", "the answer has no token")
        require_room(int(supervised[0]), self._max_length)
        if (excess := len(sample.input_ids_S) - self._max_length) > 0:
            ids, mask = sample.input_ids_S[: self._max_length], sample.loss_mask_S[: self._max_length]
            sample = dataclasses.replace(sample, input_ids_S=ids, loss_mask_S=mask)
            self._totals.truncated_samples += 1
            self._totals.truncated_tokens += excess
        self._count(sample)
        self._pending.append(sample)
        if len(self._pending) == SHARD_SAMPLES:
            self._flush()

    def close(self) -> list[Shard]:
        """Write what is left. Files of an earlier attempt beyond the last shard are removed."""
        if self._pending:
            self._flush()
        names = {shard.file for shard in self.shards}
        for path in self._folder.glob(f"{self._prefix}-*.parquet"):
            if path.name not in names:
                path.unlink()
        return self.shards

    def _count(self, sample: Sample) -> None:
        self._totals.samples += 1
        self._totals.tokens += len(sample.input_ids_S)
        self._totals.supervised_tokens += int(sample.loss_mask_S.sum())
        if sample.conversation_id != self._conversation:  # the samples of one conversation follow each other
            self._conversation = sample.conversation_id
            self._totals.conversations += 1

    def _flush(self) -> None:
        path = self._folder / f"{self._prefix}-{len(self.shards):05d}.parquet"
        self.shards.append(write_samples(path, self._pending))
        self._pending = []


def require_room(prompt_tokens: int, max_length: int) -> None:
    """Raise Rejected when a prompt leaves no room for an answer."""
    if prompt_tokens >= max_length:
        raise Rejected("prompt_too_long", f"the prompt has {prompt_tokens} tokens, target.max_length is {max_length}")
