"""A draft that has learnt a few conversations by heart is accepted almost always.

One test for many mistakes: a missing norm, a shifted label, a bad d2t, a wrong config. That it sees them is shown by
two of them, made on purpose. A layer id off by one it does not see: ids are compared directly, in test_train.py and
test_extract_states.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import train, vocab
from pipeline.config import Run, load
from pipeline.evaluate.counts import Counts, Outcome, Question
from pipeline.evaluate.reference import ReferenceEngine
from pipeline.evaluate.vllm_engine import VllmEngine
from pipeline.target import Target
from pipeline.train.draft import Draft
from pipeline.train.loss import TargetHead
from tests.models import Reference
from tests.training import greedy_answers, make_hidden, write_config

SERVE_PYTHON = Path(__file__).parents[2] / ".venv-serve" / "bin" / "python"
PROMPTS = np.random.default_rng(0).integers(0, 256, (8, 12)).tolist()
LENGTH = 64
QUESTION = Question(PROMPTS, [258], 3, LENGTH - 4, 0.0, 0)
TRAIN = {"epochs": 50, "learning_rate": 2e-3, "validation_share": 0.0, "checkpoint_steps": 100_000}
EVALUATE = {"python": str(SERVE_PYTHON), "batch_size": len(PROMPTS), "enforce_eager": True, "baseline": False}


class Memory:
    """Trains drafts on what the target says to PROMPTS."""

    def __init__(self, llama_folder: Path):
        self.llama_folder, self.reference = llama_folder, Reference(llama_folder)
        self.answers = greedy_answers(self.reference, PROMPTS, LENGTH)

    def train(self, folder: Path, **extract: str) -> Run:
        config = load(
            write_config(folder / "run.toml", self.llama_folder, train=TRAIN, evaluate=EVALUATE, extract=extract)
        )
        make_hidden(config, self.reference, PROMPTS, self.answers)
        vocab.run(config)
        train.run(config)
        return config


def by_reference(config: Run) -> Outcome:
    return ReferenceEngine(Target(config.target), config.folder("checkpoints") / "best").answer(QUESTION)


@pytest.fixture(scope="module")
def memory(llama_folder: Path) -> Memory:
    return Memory(llama_folder)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory, memory) -> Run:
    return memory.train(tmp_path_factory.mktemp("memorised"))


@pytest.fixture(scope="module")
def outcome(memorised) -> Outcome:
    return by_reference(memorised)


def test_what_was_memorised_is_accepted(outcome, memory):
    for written, learnt in zip(outcome.answers, memory.answers, strict=True):
        assert written == learnt[: len(written)]
    assert outcome.total.acceptance_length >= 3.5


def test_what_was_memorised_from_states_in_fp8_is_accepted(tmp_path, memory):
    """Trained on states with 2.6 % of error, verified by a target that has none: 3.56 to 3.69 with six seeds, where
    exact states give 3.69 to 3.87."""
    assert by_reference(memory.train(tmp_path, store_dtype="fp8")).total.acceptance_length >= 3.4


@pytest.mark.skipif(not SERVE_PYTHON.exists(), reason=f"{SERVE_PYTHON} is missing: `make test` makes it")
def test_a_later_vllm_serves_the_draft_as_it_is_and_counts_the_same(memorised, outcome):
    """Proof of names, shapes, d2t, rope and aux layer ids by a program that is not ours."""
    draft_folder = memorised.folder("checkpoints") / "best"
    served = VllmEngine(memorised, Target(memorised.target), draft_folder).answer(QUESTION)
    assert served.more["vllm"].startswith("0.32.0")
    assert served.answers == outcome.answers
    assert served.total.acceptance_length >= 3.5
    assert_equal_to_2_percent(served.total, outcome.total)


def assert_equal_to_2_percent(one: Counts, other: Counts) -> None:
    assert one.num_drafts == pytest.approx(other.num_drafts, rel=0.02)
    assert one.num_accepted_tokens_per_pos == pytest.approx(other.num_accepted_tokens_per_pos, rel=0.02)


def test_targets_without_the_final_norm_are_seen(tmp_path, memory, monkeypatch):
    """0.3.0's targets were lm_head(last state), un-normed: a lower loss and a worse draft."""
    monkeypatch.setattr(TargetHead, "normed", lambda _self, last_MH: last_MH.float())
    assert by_reference(memory.train(tmp_path)).total.acceptance_length < 2.8


def test_a_draft_fed_its_own_argmax_in_training_is_seen(tmp_path, memory, memorised, monkeypatch):
    """0.3.0 fed test-time-training steps the draft's guesses in place of the data's tokens."""
    d2t_D, _ = vocab.load_map(memorised.folder("vocab"))
    kept_D, advance = d2t_D + torch.arange(len(d2t_D)), Draft._advance

    def argmax_fed(self, chain, tokens_M, *more):
        if self.training and chain.step:
            tokens_M = kept_D[self.logits(chain.hidden_MH.detach()).argmax(-1)]
        return advance(self, chain, tokens_M, *more)

    monkeypatch.setattr(Draft, "_advance", argmax_fed)
    assert by_reference(memory.train(tmp_path)).total.acceptance_length < 3.4
