"""What is to be run through: counted in prepared/ where that is finished, assumed from [forecast] where it is not."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.config import Run
from pipeline.errors import ConfigError
from pipeline.store import read_manifest
from pipeline.store.samples import sample_sizes

ASSUMED_SAMPLES = 100_000
NAMES_BYTES = 40
"""Of a sample's and its conversation's id, where they are not known yet: `conversations.jsonl:12345` and the like."""


@dataclass(frozen=True)
class Data:
    """N samples: tokens of each, bytes of its ids, and those tokens that are the target's own words in all."""

    tokens_N: np.ndarray
    names_bytes_N: np.ndarray
    answer_tokens: int
    counted: Path | None
    """The folder that was counted; None where the numbers are assumed."""

    @property
    def samples(self) -> int:
        return len(self.tokens_N)

    @property
    def tokens(self) -> int:
        return int(self.tokens_N.sum())


def data_of(config: Run) -> Data:
    """The samples of a run. Raises InputError for a prepared/ that cannot be read, ConfigError for lengths of which a
    shorter one is to hold a longer."""
    section, folder = config.forecast, config.folder("prepared")
    if (folder / "manifest.json").is_file():
        tokens_N, names_bytes_N = sample_sizes(folder)
        supervised = read_manifest(folder, "prepare").totals.get("supervised_tokens", 0)
        return Data(tokens_N, names_bytes_N, int(supervised), folder)
    count = section.samples or config.prepare.limit or ASSUMED_SAMPLES
    length = section.tokens_per_sample or config.target.max_length
    answer = section.answer_tokens_per_sample or min(config.prepare.max_new_tokens, length // 2)
    if not answer <= length <= config.target.max_length:
        raise ConfigError(
            f"forecast: answer_tokens_per_sample {answer:,}, tokens_per_sample {length:,} and target.max_length "
            f"{config.target.max_length:,} do not fit into each other"
        )
    return Data(np.full(count, length), np.full(count, NAMES_BYTES), count * answer, None)
