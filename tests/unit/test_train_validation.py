"""What a validation compares with, and what the target's frozen parts are kept in."""

import pytest
import torch

from pipeline.train.checkpoint import Progress
from pipeline.train.loss import frozen_dtype
from tests.forecasting import make_trainer, small_run


def test_a_validation_is_exact_and_a_step_is_not(tmp_path):
    """Acceptance is decided by the target's choice among all its words; a step has its choice among the draft's."""
    trainer = make_trainer(*small_run(tmp_path, autocast=False, epochs=1))
    exact, forward = [], trainer.module.forward

    def record(row, noise, is_exact, scale_K=None):
        exact.append(is_exact)
        return forward(row, noise, is_exact, scale_K)

    trainer.module.forward = record
    trainer.validate()
    assert exact == [True, True]
    trainer.run(Progress(), lambda _: None, lambda *_: None)
    assert exact == [True] * 2 + [False] * 2 + [True] * 2, "two rows of a validation, two steps, a validation"


@pytest.mark.parametrize(
    ("dtype", "autocast", "kept"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ],
)
def test_frozen_parts_are_kept_in_bfloat16_only_where_nothing_is_lost(dtype, autocast, kept):
    assert frozen_dtype(dtype, autocast) == kept
