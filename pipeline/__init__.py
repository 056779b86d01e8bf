"""Aerie: train an EAGLE-3 draft for a target model, one step per module.

    python -m pipeline STEP --config configs/NAME.toml

The steps hand folders to each other: prepared/ -> hidden/ -> vocab/ -> checkpoints/ -> evaluation/.
"""

__version__ = "0.1.0"
