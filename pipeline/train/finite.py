"""Numbers that are not finite: whether a row has some, and which samples to look at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.train.data import Row, Rows

ADVICE = "Lower train.learning_rate, look at these samples, or set train.on_nonfinite to skip"
NAMES = 4
"""Samples that are named in a line."""


def is_finite(row: Row) -> Tensor:
    """Whether all states of a row are: one bool, on its device. In one pass and without memory for another copy."""
    ends = [*torch.aminmax(row.aux_RLH), *torch.aminmax(row.last_RH)]  # both pass NaN on
    return torch.stack(ends).isfinite().all()


def suspects(
    rows: Rows, indices: Sequence[list[int]], loaded: Sequence[Row], sums: Sequence[Tensor]
) -> tuple[list[str], list[str], list[str]]:
    """Samples to look at, each with its file: those with states that are not finite, those of rows whose loss is not,
    all. The first of these lists that is not empty, in any process, is the one to name."""

    def text(index: int) -> str:
        sample_id, path = rows.reader.origin(index)
        return f"{sample_id} in {path.name}"

    bad = [
        text(index)
        for samples, row in zip(indices, loaded, strict=True)
        for index, (start, end) in zip(samples, row.documents, strict=False)  # an empty row has one of padding
        if not (row.aux_RLH[start:end].isfinite().all() and row.last_RH[start:end].isfinite().all())
    ]
    lost = [samples for samples, part in zip(indices, sums, strict=True) if not part.isfinite().all()]
    return (
        bad,
        [text(index) for samples in lost for index in samples],
        [text(i) for samples in indices for i in samples],
    )


def listed(names: list[str]) -> str:
    """`samples a in shard-1, b in shard-2 and 3 more`."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:NAMES])}{more}"
