"""Step 5, evaluation: what the draft is worth on prompts that it has not seen.

    python -m pipeline evaluate --config configs/smollm2-135m.toml

Reads checkpoints/best and the held-out prompts, writes evaluation/summary.json. Two engines answer the same
question: `vllm` decodes with the draft and reads its own counters; `reference` verifies chains exactly with the
target in transformers, on any machine.
"""

from pipeline.evaluate.step import run

__all__ = ["run"]
