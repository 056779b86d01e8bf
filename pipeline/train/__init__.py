"""Step 4, training: the draft learns to say what the target would.

    python -m pipeline train --config configs/smollm2-135m.toml
    torchrun --nproc-per-node 8 -m pipeline train --config configs/smollm2-135m.toml

Reads hidden/ and vocab/, writes checkpoints/step-N/ (see pipeline.train.checkpoint), checkpoints/best and
curves in checkpoints/logs. A stopped run goes on from its newest checkpoint.
"""

from pipeline.train.step import run

__all__ = ["run"]
