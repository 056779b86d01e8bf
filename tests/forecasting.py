"""A small run whose training is forecast, and one forward pass of it as the trainer does it."""

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Run
from pipeline.forecast.training import FullRows
from pipeline.target import Head, Target
from pipeline.train.draft import Draft, draft_config
from pipeline.train.loop import Place, Trainer
from pipeline.train.loss import TargetHead, frozen_dtype

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


ALONE = Place(0, 1, torch.device("cpu"))


def small_run(folder: Path, **train: Any) -> tuple[Run, Target]:
    """A configuration and a target that is a config.json and nothing else."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config = Run.model_validate(
        {
            "name": "test",
            "runs_dir": str(folder / "runs"),
            "target": {"path": str(folder), "max_length": 128},
            "prepare": {"sources": ["none"]},
            "vocab": {"draft_vocab_size": 400},
            "train": {"tokens_per_row": 256, "tracker": "none", "prefetch_rows": 0, **train},
        }
    )
    return config, Target(config.target)


def make_trainer(config: Run, target: Target, place: Place = ALONE, *, sharded: bool = False) -> Trainer:
    """The trainer over full rows, on real tensors or, under a ledger, on fake ones."""
    shape, section = (target.vocab_size, target.hidden_size), config.train
    words, device = config.vocab.draft_vocab_size, place.device
    dtype = frozen_dtype(target.dtype, section.autocast)
    head = Head(torch.rand(shape).to(dtype), torch.ones(shape[1]), (torch.rand(shape) / 16).to(dtype), 1e-5)
    draft = Draft(draft_config(target, section, target.aux_layers(None), words), head.embedding_VH)
    rows: Any = FullRows(
        section.rows_per_step, section.tokens_per_row, config.target.max_length, shape[1], target.dtype
    )
    teacher = TargetHead(head, torch.arange(words), device, dtype)
    return Trainer(draft, teacher, rows, rows, section, place, 0, sharded=sharded)
