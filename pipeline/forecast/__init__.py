"""What a run will need, before anything is downloaded or loaded: disk, hours, memory of a GPU.

    python -m pipeline forecast --config configs/kimi-k2.5.toml

Needs no GPU and none of the target's weights. Writes nothing; of a target that is only on the Hugging Face hub,
config.json and the index of its weights are fetched into the hub's cache. Exit codes: 0 everything fits, 4 something
does not, and the table says what and by how much.
"""

from pipeline.forecast.step import run

__all__ = ["run"]
