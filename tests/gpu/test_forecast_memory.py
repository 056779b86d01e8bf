"""The forecast of training memory against the trainer on a GPU: to 15 %, at three sizes up to Kimi-K2.5's.

Needs a GPU of 64 GB or more for the largest. `pytest -rP` shows both numbers, part by part.
"""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import Run
from pipeline.forecast.shapes import RECORDED
from pipeline.forecast.training import FullRows, training_memory
from pipeline.target import Head, Target
from pipeline.train.checkpoint import Progress
from pipeline.train.data import Row
from pipeline.train.draft import Draft, draft_config
from pipeline.train.loop import Place, Trainer
from pipeline.train.loss import TargetHead, frozen_dtype

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it measures one's memory"),
    pytest.mark.filterwarnings("default"),  # of whatever versions that machine has
]
TOLERANCE = 0.15
KIMI = RECORDED / "moonshotai--Kimi-K2.5"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 64000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
CASES: dict[str, tuple[dict[str, Any] | Path, int, dict[str, Any]]] = {
    # name: (target, longest sample, [train])
    "llama of 2048, samples of 512": (LLAMA, 512, {"tokens_per_row": 4096}),
    "llama of 2048, two rows, frozen words": (LLAMA, 2048, {"rows_per_step": 2, "train_lm_head": False}),
    "llama of 2048, float32, noise": (LLAMA, 2048, {"autocast": False, "noise": 0.1}),
    "kimi, 2048 tokens": (KIMI, 2048, {"intermediate_size": 18432}),
    "kimi, 8192 tokens, samples of 2048": (KIMI, 2048, {"intermediate_size": 18432, "tokens_per_row": 8192}),
}


class RandomRows(FullRows):
    """Full rows whose tokens and states are random."""

    words = 1

    def load(self, row: list[int], room: Row | None = None) -> Row:
        made = super().load(row, room)
        made.tokens_R.random_(0, self.words)
        made.aux_RLH.normal_()
        made.last_RH.normal_()
        return made


@pytest.mark.parametrize("name", CASES)
def test_training_takes_what_was_forecast(name, tmp_path):
    shapes, longest, train = CASES[name]
    if isinstance(shapes, dict):
        (tmp_path / "config.json").write_text(json.dumps(shapes))
    folder = shapes if isinstance(shapes, Path) else tmp_path
    config = Run.model_validate(
        {
            "name": "gpu",
            "target": {"path": str(folder), "max_length": longest},
            "prepare": {"sources": ["none"]},
            "vocab": {"draft_vocab_size": 32000},
            "train": {"tracker": "none", "epochs": 1, "checkpoint_steps": 2, **train},
        }
    )
    target = Target(config.target)
    forecast = training_memory(config, target, 1)
    measured = trained(config, target)
    gib = {key: round(value / 2**30, 2) for key, value in vars(forecast).items()}
    print(f"{name}: measured {measured / 2**30:.2f} GiB, forecast {forecast.total / 2**30:.2f} GiB "
          f"({forecast.total / measured - 1:+.1%}): {gib}")  # fmt: skip
    assert forecast.total == pytest.approx(measured, rel=TOLERANCE), gib


def trained(config: Run, target: Target) -> int:
    """Bytes at the peak of two steps and a validation, everything from the draft's first weight on counted."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _train(config, target)
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _train(config: Run, target: Target) -> None:
    device, section = torch.device("cuda", 0), config.train
    torch.manual_seed(0)
    with device:
        shape = (target.vocab_size, target.hidden_size)
        dtype = frozen_dtype(target.dtype, section.autocast)
        embedding, rows = (torch.empty(shape, dtype=dtype).normal_(0, std) for std in (1, 0.02))
        head = Head(embedding, torch.ones(shape[1]), rows, 1e-5)
        words = config.vocab.draft_vocab_size
        draft = Draft(draft_config(target, section, target.aux_layers(None), words), head.embedding_VH)
        teacher = TargetHead(head, torch.arange(words), device, dtype)
    rows: Any = RandomRows(
        section.rows_per_step, section.tokens_per_row, config.target.max_length, target.hidden_size, target.dtype
    )
    rows.words = target.vocab_size
    losses: list[float] = []
    trainer = Trainer(draft, teacher, rows, rows, section, Place(0, 1, device), 0)
    trainer.compile()
    trainer.run(Progress(), lambda _: None, lambda _, metrics, __: losses.append(metrics["loss"]))
    assert len(losses) == 3, "two steps and a validation"
