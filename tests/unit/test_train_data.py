"""Packing: whole samples, exact lengths, an order that only seed and epoch decide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.train.data import Rows, pack, split_by_conversation


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(0, 5))
def test_every_sample_is_in_one_row_and_no_row_overflows(lengths, seed):
    rows = pack(list(range(len(lengths))), np.array(lengths), 64, (seed, 0))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)


def test_rows_are_filled():
    lengths = np.random.default_rng(0).integers(10, 300, size=500)
    rows = pack(list(range(500)), lengths, 1024, (0, 0))
    assert len(rows) <= 1.06 * lengths.sum() / 1024 + 1, "more than 6 % padding"


def test_a_sample_longer_than_a_row_is_an_error_not_a_cut():
    """0.3.0 guessed lengths from file sizes and then cut packs silently."""
    with pytest.raises(InputError, match=r"65 tokens, a row 64.*tokens_per_row"):
        pack([0], np.array([65]), 64, (0, 0))


@given(st.integers(1, 7), st.integers(1, 5))
def test_processes_share_the_rows_of_one_process(rows_per_step, world):
    class Reader:
        lengths_N = np.full(23, 30)

    rows = Rows(Reader(), list(range(23)), 64, 0, rows_per_step)  # type: ignore[arg-type]
    for step in range(rows.steps_in(0)):
        alone = rows.of_step(0, step, 0, 1)
        shared = [rows.of_step(0, step, rank, world) for rank in range(world)]
        assert len({len(part) for part in shared}) == 1, "processes would wait for each other"
        together = [row for group in zip(*shared, strict=True) for row in group]
        assert together[: len(alone)] == alone
        assert not any(together[len(alone) :])


@given(st.lists(st.sampled_from("abcdefghij"), min_size=2), st.floats(0.01, 0.9))
def test_a_conversation_is_on_one_side_of_the_split(conversations, share):
    train, validation = split_by_conversation(conversations, share, 0)
    assert sorted(train + validation) == list(range(len(conversations)))
    assert not {conversations[i] for i in train} & {conversations[i] for i in validation}
    assert train
    assert bool(validation) == (len(set(conversations)) > 1)


def test_no_share_no_validation():
    assert split_by_conversation(["a", "b"], 0.0, 0) == ([0, 1], [])
