"""What prepare does not use, and why: nothing is dropped silently.

Each rejected row (or turn) is a line of `rejected.jsonl`: source, row, id, code, reason.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pipeline.store import atomic_path

CODES = {
    "encoding": "not UTF-8, or text with half a surrogate pair",
    "json": "not JSON",
    "not_object": "JSON, but not an object",
    "no_conversation": "none of conversations, messages, prompt, turns; or one of them of a wrong type",
    "message": "a message that is not an object",
    "role": "a role that is not known",
    "empty_turn": "a message without text (and without tool calls)",
    "content": "content that is neither text nor a list of text parts",
    "tools": "tools, tool calls or other fields of a wrong type",
    "no_user_turn": "no user turn (regenerating: nothing to answer)",
    "no_assistant_turn": "no assistant turn, and regenerate is off",
    "duplicate": "the same conversation came before",
    "template": "the chat template refuses the conversation",
    "end_in_text": "an answer that contains the end-of-turn token as text",
    "control_in_text": "text that contains a token which makes turns, calls or images, or a stray <think>",
    "prefix": "the generation prompt is not how the rendered turn begins",
    "no_reasoning": "the template opens the reasoning, the answer has none",
    "prompt_too_long": "no room for an answer within target.max_length",
    "no_supervised_token": "nothing to predict",
    "empty_answer": "the target ended its turn without a word",
}
"""Machine-readable codes and what they mean."""

LONGEST_REASON = 300
"""Characters of a reason that are kept; templates can quote whole conversations."""


class Rejected(Exception):  # noqa: N818  it is a verdict on the data, not an error of ours
    """Why a row or turn cannot be used: a code of `CODES` and a sentence."""

    def __init__(self, code: str, reason: str):
        assert code in CODES, code
        super().__init__(reason)
        self.code, self.reason = code, " ".join(reason.split())[:LONGEST_REASON]


@dataclass(frozen=True)
class Rejection:
    """A line of rejected.jsonl. `row` counts from 1: the line of a JSONL file, the row of a Parquet file."""

    source: str
    row: int
    id: str | None
    code: str
    reason: str


class Rejects:
    """The open rejected.jsonl and a count per code."""

    def __init__(self, file: IO[str]):
        self._file = file
        self.counts: Counter[str] = Counter()

    def add(self, rejection: Rejection) -> None:
        """Write one line, count it."""
        self.counts[rejection.code] += 1
        # ASCII escapes: a reason may quote half a surrogate pair, which UTF-8 cannot hold
        self._file.write(json.dumps(asdict(rejection)) + "\n")


@contextmanager
def open_rejects(path: Path) -> Iterator[Rejects]:
    """Collect rejections; the file takes its place, whole, at the end."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="ascii") as file:
        yield Rejects(file)
        file.flush()
