"""What both engines count, under the names of vLLM's own counters."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass
class Counts:
    """Verification steps (`num_drafts`), draft tokens in them, and how many were accepted at each position."""

    num_drafts: int
    num_accepted_tokens_per_pos: list[int]
    output_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step, the bonus token included; 1.0 when nothing was drafted."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / max(self.num_drafts, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of verification steps that accepted the 1st, 2nd, ... draft token."""
        return [accepted / max(self.num_drafts, 1) for accepted in self.num_accepted_tokens_per_pos]


@dataclass
class Outcome:
    """An engine's answer: the counts of each prompt (or of all together), the answers' ids, what else it measured."""

    counts: list[Counts]
    answers: list[list[int]]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Counts:
        """Counts summed over prompts."""
        accepted = np.sum([c.num_accepted_tokens_per_pos for c in self.counts], axis=0).tolist()
        return Counts(sum(c.num_drafts for c in self.counts), accepted, sum(c.output_tokens for c in self.counts))


@dataclass(frozen=True)
class Question:
    """What an engine is asked to decode: prompts as ids, stop ids, and how."""

    prompts: list[list[int]]
    stop_ids: list[int]
    num_speculative_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int


class Engine(Protocol):
    """Decodes a question with the draft and counts what was accepted."""

    def answer(self, question: Question) -> Outcome: ...


def interval(counts: list[Counts], seed: int, draws: int = 2000) -> list[float] | None:
    """95 % bootstrap interval of the acceptance length over prompts; None for fewer than two."""
    if len(counts) < 2:
        return None
    drafts = np.array([c.num_drafts for c in counts])
    accepted = np.array([sum(c.num_accepted_tokens_per_pos) for c in counts])
    picks = np.random.default_rng(seed).integers(len(counts), size=(draws, len(counts)))
    lengths = 1 + accepted[picks].sum(1) / np.maximum(drafts[picks].sum(1), 1)
    return [float(q) for q in np.quantile(lengths, [0.025, 0.975])]
