"""Step 4, training: the draft learns to say what the target would.

    python -m pipeline train --config configs/smollm2-135m.toml
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 -m pipeline train

Reads hidden/ and vocab/, writes checkpoints/step-N/ (see pipeline.train.checkpoint), checkpoints/best and
curves in checkpoints/logs. One process a GPU (pipeline.train.launch), on several machines torchrun's
(pipeline.train.machines). A stopped run goes on from its newest checkpoint.
"""

from pipeline.train.launch import run

__all__ = ["run"]
