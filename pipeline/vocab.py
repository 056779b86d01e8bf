"""Step 3, vocabulary mapping: choose the draft's words.

    python -m pipeline vocab --config configs/smollm2-135m.toml

Reads prepared/ (supervised tokens first, then the prompts'), writes vocab/vocab_map.safetensors:
    d2t_D  int64, d2t_D[i] is what to add to draft id i to get its target id
    t2d_V  bool, true for the D target ids that the draft can say
The convention is EAGLE-3's (Li et al. 2025) as vLLM loads it; D words of the draft, V words of the target. Ties go to
the lower id, so that equal data give equal maps. Control tokens (end of turn, thinking and tool markers) are always in.
When D = V the map is the identity; it is written all the same, and training leaves it out of the checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import Run
from pipeline.errors import ConfigError, InputError
from pipeline.store import Manifest, Shard, atomic_path, claim, exclusive, finish, read_manifest, verify
from pipeline.store.samples import read_samples
from pipeline.target import Target

if TYPE_CHECKING:
    import torch

STEP = "vocab"
FILE = "vocab_map.safetensors"
COUNT_TOKENS = 1 << 20
"""Tokens that are counted in one go: each costs an array of V counts, so not sample by sample."""


def run(config: Run) -> None:
    """Make `vocab/`, or say that it is done.

    Raises ConfigError for a draft vocabulary that does not fit the target's, InputError for data that don't.
    """
    target = Target(config.target)
    size, control_ids = config.vocab.draft_vocab_size, target.control_ids
    _check_size(size, target.vocab_size, control_ids)
    folder, prepared = config.folder("vocab"), config.folder("prepared")
    source = read_manifest(prepared, "prepare")
    inputs = {"prepared": source.run_key, "draft_vocab_size": size, "vocab_size": target.vocab_size,
              "control_ids": control_ids}  # fmt: skip
    with exclusive(folder, STEP):
        if manifest := claim(folder, STEP, inputs, resumes=False):
            verify(folder, manifest)
            print(f"{STEP}  already done: {_summary(manifest)}  {folder}")
            return
        supervised_V, other_V = count_tokens(prepared, target.vocab_size)
        words_D = choose_words(size, control_ids, supervised_V, other_V)
        shard = _write(folder / FILE, words_D, target.vocab_size)
        total, held = int(supervised_V.sum()), int(supervised_V[words_D].sum())
        totals = {
            "draft_vocab_size": size,
            "vocab_size": target.vocab_size,
            "supervised_tokens": total,
            "coverage": held / total,
            "words_in_supervised": int(np.count_nonzero(supervised_V)),
        }
        manifest = finish(folder, STEP, inputs, [shard], totals)
    print(f"{STEP}  {_summary(manifest)}  {folder}")


def count_tokens(prepared: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each target id is supervised, and how often it is there otherwise: two int64 arrays of V.

    Raises InputError for an id that the target does not have.
    """
    supervised_V, other_V = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for ids_S, mask_S in _chunks(prepared):
        if ids_S.min(initial=0) < 0 or ids_S.max(initial=0) >= vocab_size:
            wrong = int(ids_S[(ids_S < 0) | (ids_S >= vocab_size)][0])
            raise InputError(
                f"{STEP}: {prepared} has token id {wrong}, the target has {vocab_size:,} words. "
                "Was it prepared with another tokenizer? Run prepare again"
            )
        supervised_V += np.bincount(ids_S[mask_S], minlength=vocab_size)
        other_V += np.bincount(ids_S[~mask_S], minlength=vocab_size)
    if not supervised_V.any():
        raise InputError(f"{STEP}: {prepared} has no supervised token. Run prepare again")
    return supervised_V, other_V


def choose_words(size: int, control_ids: list[int], supervised_V: np.ndarray, other_V: np.ndarray) -> np.ndarray:
    """The draft's `size` target ids, ascending, int64.

    Control tokens, then by supervised count, then by count in prompts (their words come back in answers: at 4096 words
    of SmolLM2 this order reaches 88.0 % of held-out tokens), then by id.
    """
    vocab_size = len(supervised_V)
    is_control_V = np.zeros(vocab_size, bool)
    is_control_V[control_ids] = True
    order_V = np.lexsort((np.arange(vocab_size), -other_V, -supervised_V, ~is_control_V))  # last key first
    return np.sort(order_V[:size]).astype(np.int64)


def load_map(folder: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    """(d2t_D int64, t2d_V bool) of a finished vocab/ folder.

    Raises InputError when the folder is unfinished, its file is not the one written, or the map is not one.
    """
    from safetensors.torch import load_file

    manifest = read_manifest(folder, STEP)
    verify(folder, manifest)
    tensors = load_file(folder / FILE)
    import torch

    if set(tensors) != {"d2t", "t2d"}:
        raise InputError(f"{STEP}: {folder / FILE} has {sorted(tensors)}, not d2t and t2d. Run vocab again")
    d2t_D, t2d_V = tensors["d2t"], tensors["t2d"]
    words_D = torch.arange(len(d2t_D)) + d2t_D
    if d2t_D.dtype != torch.int64 or t2d_V.dtype != torch.bool or not torch.equal(t2d_V.nonzero().flatten(), words_D):
        raise InputError(f"{STEP}: {folder / FILE}: d2t and t2d do not name the same words. Run vocab again")
    return d2t_D, t2d_V


def _check_size(size: int, vocab_size: int, control_ids: list[int]) -> None:
    if size > vocab_size:
        raise ConfigError(
            f"{STEP}: vocab.draft_vocab_size {size:,} is more than the target's {vocab_size:,} words. "
            f"Set it to {vocab_size} or less"
        )
    if size < len(control_ids):
        raise ConfigError(
            f"{STEP}: vocab.draft_vocab_size {size:,} does not even hold the target's {len(control_ids):,} control "
            "tokens. Set it to some thousand"
        )
    if wrong := [i for i in control_ids if not 0 <= i < vocab_size]:
        raise InputError(
            f"{STEP}: the tokenizer's control token {wrong[0]} is not one of the target's {vocab_size:,} words. "
            "Tokenizer and config.json do not belong together"
        )


def _chunks(prepared: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and masks of about COUNT_TOKENS tokens at a time."""
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    tokens = 0
    for sample in read_samples(prepared):
        ids.append(sample.input_ids_S)
        masks.append(sample.loss_mask_S)
        tokens += len(sample.input_ids_S)
        if tokens >= COUNT_TOKENS:
            yield np.concatenate(ids), np.concatenate(masks)
            ids, masks, tokens = [], [], 0
    if ids:
        yield np.concatenate(ids), np.concatenate(masks)


def _write(path: Path, words_D: np.ndarray, vocab_size: int) -> Shard:
    from safetensors.numpy import save_file

    t2d_V = np.zeros(vocab_size, bool)
    t2d_V[words_D] = True
    tensors: dict[str, Any] = {"d2t": words_D - np.arange(len(words_D), dtype=np.int64), "t2d": t2d_V}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    return Shard.describe(path, samples=0, tokens=0)


def _summary(manifest: Manifest) -> str:
    totals = manifest.totals
    return (
        f"{totals['draft_vocab_size']:,} of {totals['vocab_size']:,} words hold {totals['coverage']:.1%} "
        f"of {totals['supervised_tokens']:,} supervised tokens"
    ).replace("%", " %")
