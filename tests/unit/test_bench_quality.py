"""The benchmark of what is learnt: the other trainer's data, and the arithmetic of the comparison."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks import quality, reference_data
from benchmarks.quality import Trained, difference, page, validation_of
from benchmarks.reference_data import convert, tensors_of, train_ratio
from benchmarks.reference_trainer import ranges
from pipeline.errors import MismatchError
from pipeline.evaluate.counts import Counts, Outcome
from pipeline.evaluate.vllm_engine import _counts
from pipeline.store.states import StatesSample

LENGTHS = [5, 3, 4, 6]


def sample(index: int) -> StatesSample:
    size = LENGTHS[index]
    mask_S = torch.arange(size) >= 2
    aux_SLH = torch.arange(3.0).view(1, 3, 1).expand(size, 3, 2) + 10 * index
    return StatesSample(f"s{index}", torch.arange(size) + index, mask_S, aux_SLH.clone(), torch.full((size, 2), 9.0))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call it to convert four samples of a run to tmp_path/data."""
    monkeypatch.setattr(reference_data, "load_map", lambda _: (torch.tensor([1, 2]), torch.arange(4) % 2 == 1))
    monkeypatch.setattr(reference_data, "read_manifest", lambda *_: SimpleNamespace(run_key="words"))

    def call(key: str = "states"):
        reader = SimpleNamespace(
            conversation_ids=list("abcd"), read=sample, manifest=SimpleNamespace(run_key=key), lengths_N=LENGTHS
        )
        config = SimpleNamespace(train=SimpleNamespace(validation_share=0.25), seed=0, folder=Path)
        return convert(config, reader, tmp_path / "data")  # type: ignore[arg-type]

    return call


def test_the_last_state_comes_last_and_layers_keep_their_order():
    """The other trainer takes all layers but the last for the draft's input, and the last one for its target."""
    states_SLH = tensors_of(sample(1))["hidden_states"]
    assert states_SLH[0].tolist() == [[10, 10], [11, 11], [12, 12], [9, 9]]


def test_rows_are_the_training_samples_then_those_for_validation(run, tmp_path):
    import datasets

    train, validation = run()
    rows = datasets.load_from_disk(str(tmp_path / "data"))
    assert (len(train), len(validation)) == (3, 1)
    for row, index in enumerate([*train, *validation]):
        want, got = sample(index), rows[row]
        assert torch.equal(got["input_ids"], want.input_ids_S)
        assert torch.equal(got["loss_mask"], want.loss_mask_S.long())
        assert got["seq_len"] == LENGTHS[index]
        states = load_file(tmp_path / "data" / "hidden_states" / f"hs_{row}.safetensors")
        assert torch.equal(states["token_ids"], want.input_ids_S)
    assert np.load(tmp_path / "data" / "d2t-2.npy").tolist() == [1, 2]
    assert np.load(tmp_path / "data" / "t2d-2.npy").tolist() == [False, True, False, True]


def test_data_of_another_run_is_refused(run):
    assert run() == run()
    with pytest.raises(MismatchError, match="another run"):
        run("other states")


@given(st.integers(1, 20_000), st.integers(1, 2_000))
def test_the_trainer_splits_where_the_run_does(train, validation):
    assert int((train + validation) * train_ratio(train, validation)) == train


def test_documents_are_found_and_padding_is_none():
    assert ranges([0, 0, 1, 2, 2, 2, -1, -1]) == [(0, 2), (2, 3), (3, 6)]
    assert ranges([-1]) == []


def test_validation_adds_the_bonus_token_to_what_all_steps_up_to_one_hit():
    assert validation_of({"full_acc_0_epoch": 0.3, "full_acc_1_epoch": 0.1, "cond_acc_1_epoch": 0.5}) == 1.4


def test_a_difference_draws_the_same_prompts_for_both():
    """Prompts differ more than drafts do: drawn apart, the interval would be as wide as both drafts' own."""
    easy, hard = Counts(10, [9, 8]), Counts(20, [2, 0])
    ours = [easy, hard] * 10
    others = [
        Counts(c.num_drafts, [c.num_accepted_tokens_per_pos[0] - 1, *c.num_accepted_tokens_per_pos[1:]]) for c in ours
    ]
    assert difference(ours, ours, 0) == (0, 0, 0)
    mean, low, high = difference(ours, others, 0)
    assert mean == pytest.approx(2 / 30)
    assert 0.05 < low < mean < high < 0.1


def test_the_page_names_each_draft_with_its_interval():
    drafts = [
        Trained("ours", Path("a"), 497, 490_920, 232.4, 1.61),
        Trained("other", Path("b"), 64, 490_920, 300, None),
    ]
    outcome = Outcome([Counts(10, [5, 2, 1]), Counts(12, [3, 1, 0])], [[1], [2]])
    lines = page(drafts, [outcome, outcome], 0).splitlines()
    assert "1.545" in lines[1]
    assert "490,920" in lines[1]
    assert lines[3].startswith("ours - other: +0.000")


def test_vllm_counts_each_prompt_that_it_decodes_alone():
    one = {"num_drafts": 4, "num_accepted_tokens_per_pos": [2, 1]}
    none = {"num_drafts": 0, "num_accepted_tokens_per_pos": 0}
    assert _counts([one, none], [[1, 2], [3]], 2) == [Counts(4, [2, 1], 2), Counts(0, [0, 0], 1)]
    assert _counts([one], [[1, 2], [3]], 2) == [Counts(4, [2, 1], 3)]


def test_a_reference_is_needed(capsys):
    with pytest.raises(SystemExit) as stopped:
        quality.main([])
    assert stopped.value.code == 2
    assert "--reference" in capsys.readouterr().err


def test_a_reference_that_is_not_there_is_told_in_a_line(tmp_path, capsys):
    assert quality.main(["--reference", str(tmp_path / "python")]) == 2
    assert "is no Python" in capsys.readouterr().err
