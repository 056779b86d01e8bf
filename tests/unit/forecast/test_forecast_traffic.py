"""What gradients take between GPUs, against numbers worked out by hand."""

import pytest

from pipeline.forecast.traffic import all_reduce
from pipeline.forecast.training import training_memory
from tests.forecasting import small_run

KIMI = 1_190_948_864
"""Weights of its draft: three times 14,336 x 8,192 for queries, keys and values, 8,192 x 7,168 back, three times
7,168 x 18,432, 21,504 x 7,168 for the states, 32,000 x 7,168 for the words, four norms of 7,168."""
WORDS = 32_000 * 7168


@pytest.mark.parametrize(
    ("trainable", "processes", "gb_per_s", "link_bytes", "seconds"),
    [
        (10**9, 8, 40, 7e9, 0.175),  # 4 GB, 14/8 of it
        (10**9, 2, 10, 4e9, 0.4),  # two: each sends half and gets half, twice
        (10**9, 1, 10, 0, 0),
        (KIMI, 8, 37.6, 8_336_642_048, 0.2217),
    ],
)
def test_bytes_and_seconds_of_a_step(trainable, processes, gb_per_s, link_bytes, seconds):
    cost = all_reduce(trainable, 0, processes, gb_per_s)
    assert cost.gradient_bytes == 4 * trainable
    assert cost.link_bytes == link_bytes
    assert cost.seconds == pytest.approx(seconds, rel=1e-3)
    assert cost.hidden_s == 0, "without rows for words all gradients come at the end"


def test_only_the_words_gradients_come_before_the_end():
    cost = all_reduce(KIMI, WORDS, 8, 37.6)
    assert cost.hidden_s == pytest.approx(0.2217 * 0.1926, rel=1e-3)


@pytest.mark.parametrize("train_lm_head", [True, False])
def test_the_weights_are_those_that_the_trainer_trains(tmp_path, train_lm_head):
    """hidden size 256, 512 in the middle, four heads and two for keys and values, of 64; 400 words."""
    memory = training_memory(*small_run(tmp_path, train_lm_head=train_lm_head), 2)
    words = 400 * 256
    others = 512 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 512 + 768 * 256 + 4 * 256
    assert memory.output_rows == words * train_lm_head
    assert memory.trainable == others + memory.output_rows
