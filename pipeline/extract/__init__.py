"""Step 2, hidden states: what the target thinks at every prepared token.

    python -m pipeline extract --config configs/smollm2-135m.toml

Reads prepared/, writes hidden/: shards of about `extract.shard_tokens` tokens (pipeline.store.states tells their
form) and a manifest. An interrupted run goes on where it stopped: finished shards are verified by checksum and kept,
all else is made again, and the folder is byte-identical to that of an undisturbed run. With the engine `stream` the
states may differ in their last bits, where the target rounds by what runs together.
"""

from pipeline.config import Run

__all__ = ["run"]


def run(config: Run) -> None:
    """Extract the states of all prepared samples, or of those that are left. Raises UserError; see pipeline.errors."""
    from pipeline.extract.step import extract  # torch, numpy: not for --help

    extract(config)
